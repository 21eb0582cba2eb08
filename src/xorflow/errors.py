"""The errors that xorflow raises on purpose.

Each message says the rule, what came, and what to do instead. `UserError` is their common base: the
command line prints such a message in one line and exits with code 2; anything else is a bug of ours.
"""


class UserError(Exception):
    """Something in the input, the configuration or the environment that the user can mend."""


class DataError(UserError, ValueError):
    """Data that breaks a rule: a wrong value, width or type, or a damaged file."""


class ModelError(UserError, ValueError):
    """A model that would not be normalised, or whose layers and base do not fit together."""


class ConfigError(UserError, ValueError):
    """An option or a combination of options that means nothing."""


class CheckpointError(UserError):
    """A run folder that is missing, damaged, foreign, or in use."""


class Intractable(UserError):
    """An exact quantity that this model does not have; the message names what to call instead."""


class TrainingError(UserError):
    """A run that cannot go on, such as one whose loss is no longer finite."""


class OutOfMemory(UserError):
    """Memory that is not there; the message names the option that lowers the need."""
