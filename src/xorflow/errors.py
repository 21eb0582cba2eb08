"""The errors that xorflow raises on purpose.

Each message says the rule, what came, and what to do instead. `UserError` is their common base: the
command line prints such a message in one line and exits with code 2; anything else is a bug of ours.
"""

import re

_MOST = 200
"""So many characters of what came are repeated."""

_LONGEST = 2000
"""So many characters a line has at most, however many things it names."""

# a quote that ends a word opens none: what stands between two short values is ours
_LONG = re.compile(rf"(?<!\w)'[^']{{{_MOST},}}'|(?<!\w)\"[^\"]{{{_MOST},}}\"|\S{{{_MOST},}}")


def in_one_line(message: str) -> str:
    """A message as it is shown: one line, nothing in it that a terminal obeys, long values cut.

    >>> len(in_one_line(f"lr is a number; got {'9' * 10_000!r}"))
    220
    """
    line = "".join(c if c.isprintable() else _escaped(c) for c in " ".join(message.split()))
    line = _LONG.sub(lambda match: _cut(match[0], _MOST), line)
    return _cut(line, _LONGEST)


def _cut(text: str, most: int) -> str:
    """The beginning and the end of a long text."""
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-(most - most // 2 - 3) :]}"


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode()


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


class ProcessLost(TrainingError):
    """Another process of the same run has ended, or does not answer."""


class EvaluationError(UserError):
    """A likelihood that could not be computed, or is no finite number; a trained run keeps its weights and all else."""


class OutOfMemory(UserError):
    """Memory that is not there; the message names the option that lowers the need."""
