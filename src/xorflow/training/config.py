"""All options of a run, each declared once: for the command line, files, `config.json`, Python and the documents."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_type_hints

from xorflow._files import read_bytes, read_json
from xorflow.errors import ConfigError
from xorflow.training import recipes
from xorflow.training.registry import (
    BASES,
    CONDITIONERS,
    ESTIMATORS,
    MOST,
    POSTERIORS,
    TRANSFORMS,
    Registry,
    accepted_value,
    nearest,
    read_value,
    value_rule,
    value_text,
)

CONFIG_VERSION = 7

_MOST_TOML = 2**20
"""The most bytes of a .toml file."""


@dataclass(frozen=True)
class Needs:
    """Without what an option has no effect: another one has one of these values or names, or, if `but`, none of them.

    Attributes:
        option: the other one.
        names: values, or names without their settings.
        but: whether it must have none of them.
        because: why, in words.
        of: the only value that needs it; None: all but the default.
    """

    option: str
    names: tuple[Any, ...]
    but: bool = False
    because: str = ""
    of: str | None = None

    def __str__(self) -> str:
        reason = f" ({self.because})" if self.because else ""
        return (
            f"{self.option} is {'not ' if self.but else ''}{' or '.join(map(value_text, self.names))}{reason}"
        )

    def holds(self, other: Any) -> bool:
        return (other in self.names or str(other).partition(":")[0] in self.names) is not self.but


_LIMITS = {"at least": operator.ge, "greater than": operator.gt, "below": operator.lt}


@dataclass(frozen=True)
class Option:
    """What is known of one option.

    Attributes:
        group: its section in the documents.
        default: its value unless another is given.
        help: what it does, with values as code.
        range: of a number: what it is `at least`, `greater than` or `below`.
        registry: whose names it takes, with their settings.
        needs: without which it has no effect.
        flag: whether it is a flag of the command line; `--set` takes all.
        harmless: whether it may change when a run is resumed: it does not touch what is learned on one device.
        name: that of the field.
        type: that of the field.
    """

    group: str
    default: Any
    help: str
    range: Mapping[str, float] = field(default_factory=dict)
    registry: Registry | None = None
    needs: tuple[Needs, ...] = ()
    flag: bool = False
    harmless: bool = False
    name: str = ""
    type: Any = None

    def accept(self, value: Any, read: Callable[[Any, Any], Any] = accepted_value) -> Any:
        """The value as it is kept, if the option may have it; `read_value` reads it from a text."""
        try:
            value = read(value, self.type)
        except ValueError:
            raise ConfigError(f"{self.name} is {value_rule(self.type)}; got {value!r}") from None
        if type(value) in (int, float):
            broken = [f"{w} {limit:,}" for w, limit in self.range.items() if not _LIMITS[w](value, limit)]
            if broken or math.isinf(value):
                raise ConfigError(f"{self.name} is {' and '.join(broken) or 'finite'}; got {value}")
        return value

    def require_effect(self, value: Any, known: Mapping[str, Any]) -> None:
        """Refuse a value that changes nothing, beside those of other options as far as they are known."""
        if value == self.default:
            return
        for need in self.needs:
            other = known.get(need.option, need)
            if other is not need and need.of in (None, value) and not need.holds(other):
                choice = f"another value of {need.option}" if need.but else f"{need.option}={need.names[0]}"
                raise ConfigError(
                    f"{self.name} has an effect only if {need}; got {self.name}={value_text(value)} with "
                    f"{need.option}={value_text(other)}: leave {self.name} at {value_text(self.default)}, or choose {choice}"
                )


def _declared(group: str, default: Any, help: str, **more: Any) -> Any:
    return field(default=default, metadata={"option": Option(group, default, help, **more)})


_data, _training, _run = (functools.partial(_declared, group) for group in ("Data", "Training", "Run"))
DESCRIBED = Needs("layers", (None,), but=True, because="a model that was built in Python has its own")


def _model(default: Any, help: str, needs: tuple[Needs, ...] = (), **more: Any) -> Any:
    return _declared("Model", default, help, needs=(*needs, DESCRIBED), **more)


_COUNT, _SOME = {"at least": 0, "below": MOST}, {"at least": 1, "below": MOST}
_SEED = {"at least": 0, "below": 2**40}  # room for the number of an epoch beside it
_POSITIVE, _AMOUNT, _SHARE = {"greater than": 0}, {"at least": 0}, {"at least": 0, "below": 1}

_file = functools.partial(_data, needs=(Needs("data", ("mnist",), but=True),))
_IN_SEQUENCES = Needs("conditioner", ("transformer", "recurrent"))
_IN_MIXTURES = Needs("mixture", ("none",), but=True)

_STATE_ALONE = Needs(
    "conditioner", ("coupling",), but=True, because="a coupling sees the running state alone"
)
_ORDERED = Needs("conditioner", ("coupling",), but=True, because="a coupling has a mask and no ordering")
_AUTO = Needs("recipe", ("auto", recipes.AUTO.label))
_ONE_LAYER = "a mixture is of flows of one layer, trained by their exact likelihood"
_OUTSIDE_MIXTURES = Needs("mixture", ("none",), because=_ONE_LAYER)


@dataclass(frozen=True)
class Options:
    """Everything that a run depends on; `config.json` holds all of it. docs/options.md lists them, from these declarations.

    An option that would change nothing is refused. Without `layers` the model is made in Python: what it is, and what then has
    no effect, is known when a run begins.
    """

    data: str = _data("mnist", "`mnist`, or a file", flag=True)
    validation_data: str | None = _file(None, "a file of rows that validate", flag=True)
    test_data: str | None = _file(None, "a file of rows that test", flag=True)
    part: str | None = _file(
        None,
        "the column of a table that says of each row `train`, `validation` or `test`",
    )
    header: bool | None = _file(
        None,
        "whether the first line of a text file names the columns; by default a rule decides",
    )
    schema: str | None = _file(
        None,
        "a .toml file about the columns of a table",
        flag=True,
    )
    rare: int = _file(
        0,
        "merge values that fewer rows have",
        range=_COUNT,
        flag=True,
    )
    stream: Literal["auto", "always", "never"] = _file(
        "auto",
        "keep rows in files: `always`, `never`",
        flag=True,
    )
    categories: int | None = _file(
        None,
        "how many values every feature of an array has, for images some of whose pixels never vary; else those that occur",
        range={"at least": 2, "below": MOST},
    )
    validation: float | None = _data(
        None,
        "rows, or a share of them, that validate",
        range=_AMOUNT,
        flag=True,
    )
    test: float | None = _file(
        None,
        "rows, or a share of them, that test; by default a tenth",
        range=_AMOUNT,
    )
    data_seed: int = _data(
        0, "names the binarisation of the evaluation sets, or the split of a file", range=_SEED
    )
    label: bool = _data(False, "condition on MNIST's labels", needs=(Needs("data", ("mnist",)),))
    recipe: str = _model(
        recipes.NONE,
        "named options; `auto` for tables",
        flag=True,
    )
    layers: int | None = _declared(
        "Model", 1, "the depth", range=_SOME, needs=(_OUTSIDE_MIXTURES,), flag=True
    )
    conditioner: str = _model("made", "the network of each layer", registry=CONDITIONERS, flag=True)
    skip: float = _model(
        0.0,
        "features that differ from their usual value in at most this share of rows take no step; 0: all take one",
        range=_SHARE,
        needs=(_IN_SEQUENCES,),
    )
    order: str = _model(
        "natural",
        "`natural`, `reversed`, `alternating`, `random`, `random:SEED`, of images also `columns`, `columns-reversed`, "
        "`outward` and `inward`; or one a layer, with commas",
        needs=(Needs("mixture", ("none",), because="which names its own"), _ORDERED),
    )
    mixture: str = _model(
        "none",
        "the orderings, with commas, of several flows that are mixed; or how many of the usual ones",
        needs=(_ORDERED,),
    )
    shared: bool = _model(
        True, "the flows of a mixture share one network", needs=(_IN_MIXTURES, _IN_SEQUENCES)
    )
    variant: Literal["state", "chain"] = _model(
        "state",
        "layers see the running `state`, or each the choices of the layer before, a `chain`, in one ordering",
        needs=(_STATE_ALONE, Needs("layers", (1,), but=True, because="the first layer is the same in both")),
    )
    own: bool = _model(False, "each layer also sees its own choices that came before", needs=(_STATE_ALONE,))
    posterior: str = _model(
        "none",
        "the network from which layers are drawn in training: `mlp` sees all data, `made` those up to each feature; "
        "`linear`, in all data, and `diagonal`, in each feature's own value, correct the generator",
        registry=POSTERIORS,
        needs=(_OUTSIDE_MIXTURES,),
    )
    transform: str = _model("shift", "what is chosen, modulo K", registry=TRANSFORMS)
    base: str = _model("learned", "the distribution of y", registry=BASES, flag=True)
    init: str = _training(
        "data",
        "`data` begins at independent features, posteriors at Bayes' rule; `biases` sets the generators' output biases alone; "
        "`random` sets nothing; or the folder of a finished run: its layers become the last ones, before them others near the "
        "identity, and its base is taken over unless `base` names p0",
    )
    estimator: str = _training(
        "maximum-likelihood",
        "how the gradient is estimated",
        registry=ESTIMATORS,
        flag=True,
    )
    epochs: int = _training(30, "passes over the training data", range=_SOME, flag=True)
    batch_size: int = _training(128, "rows a step", range=_SOME, flag=True)
    accumulate: int = _training(
        1,
        "pass a batch in so many parts, to save memory",
        range=_SOME,
    )
    lr: float = _training(1e-3, "the highest learning rate", range=_POSITIVE, flag=True)
    schedule: Literal["cosine", "constant"] = _training(
        "cosine", "of the learning rate after the warm-up; a cosine falls to zero"
    )
    warmup: int = _training(0, "steps over which the learning rate rises", range=_COUNT)
    optimiser: Literal["adam", "adamw", "muon", "sgd"] = _training(
        "adam",
        "`muon` is AdamW but for matrices within transformers and recurrent networks",
        needs=(dataclasses.replace(_IN_SEQUENCES, of="muon"),),
    )
    weight_decay: float = _training(0.0, "of matrices, not of biases, embeddings or the base", range=_AMOUNT)
    clip: float = _training(0.0, "the largest norm of the gradient; 0: unlimited", range=_AMOUNT)
    average: float = _training(
        0.0,
        "decay of an exponential average of the weights, which is then evaluated; 0: none",
        range=_SHARE,
    )
    precision: Literal["auto", "32-true", "tf32", "bf16-mixed", "64-true"] = _training(
        "auto", "of training; `auto` is `tf32`, of matrix products, on CUDA, and otherwise `32-true`"
    )
    compile: bool = _training(
        False,
        "compile a transformer's blocks on CUDA: a minute at the start, then faster steps",
        needs=(Needs("conditioner", ("transformer",)),),
    )
    validate_every: int = _training(1, "epochs between validations", range=_SOME)
    patience: int | None = _training(
        None,
        "stop after so many validations without better weights",
        range=_SOME,
        needs=(Needs("validation", (0,), but=True),),
    )
    select: Literal["likelihood", "greedy"] = _training(
        "likelihood",
        "by which likelihood of validation data weights are kept; `greedy` is that of the flow",
    )
    minutes: float = _training(2.0, "that recipe auto may take", range=_POSITIVE, needs=(_AUTO,), flag=True)
    orderings: int | None = _training(
        None,
        "of the recipe auto, instead of as many as fit into `minutes`",
        range={"at least": 1, "below": 9},
        needs=(_AUTO,),
    )
    seed: int = _run(0, "of weights, order of rows, and noise", range=_SEED, flag=True)
    device: str = _run("auto", "`auto`, `cpu`, `cuda`, `cuda:N` or `mps`", flag=True, harmless=True)
    checkpoint_seconds: float = _run(
        30.0, "how often, at least, progress is saved", range=_AMOUNT, harmless=True
    )
    evaluation_samples: int = _run(
        64,
        "samples of the importance-weighted bound, where there is no exact likelihood",
        range=_SOME,
        harmless=True,
    )
    tensorboard: bool = _run(False, "also write TensorBoard event files", harmless=True)

    def __post_init__(self) -> None:
        for name, option in OPTIONS.items():
            object.__setattr__(self, name, option.accept(getattr(self, name)))
            # a model, and an estimator, that were made in Python may be of other classes
            if option.registry is not None and self.layers is not None:
                option.registry.read(getattr(self, name))
        if self.recipe != recipes.NONE:
            recipes.check_data(self.recipe, self.data)
        self.require_effects()
        if self.init not in INITS and "/" not in self.init and "\\" not in self.init:
            raise ConfigError(
                f"init is one of {', '.join(INITS)}, or the folder of a run, written with a slash, as in ./runs/demo; "
                f"got {self.init!r}"
            )

    @property
    def is_auto(self) -> bool:
        """Whether the run is of the recipe auto, a search of its own."""
        return _AUTO.holds(self.recipe)

    def require_effects(self, **actual: Any) -> None:
        """Refuse an option that changes nothing beside the others, or beside what `actual` says of model and data instead."""
        unknown = () if self.layers is not None else set(OF_A_MODEL) - {"layers"}
        known = {name: value for name, value in vars(self).items() if name not in unknown} | actual
        for name, option in OPTIONS.items():
            option.require_effect(getattr(self, name), known)

    def to_json(self) -> dict[str, Any]:
        """As `config.json` holds them."""
        return dataclasses.asdict(self)

    def without_model(self) -> Options:
        """Of a run whose model is built in Python: those that describe a model have their defaults, and `layers` is None."""
        return self.replace(**{name: OPTIONS[name].default for name in OF_A_MODEL} | {"layers": None})

    def replace(self, **changes: Any) -> Options:
        """A copy with some options changed, checked."""
        if changes.get("recipe", self.recipe) != self.recipe:
            changes = recipes.expanded(changes)
            recipes.check_alone(self.recipe, changes["recipe"])
        return from_json(self.to_json() | changes)


OPTIONS: dict[str, Option] = {
    one.name: dataclasses.replace(
        one.metadata["option"], name=one.name, type=get_type_hints(Options)[one.name]
    )
    for one in dataclasses.fields(Options)
}
"""By name."""

OF_DATA = tuple(name for name, option in OPTIONS.items() if option.group == "Data")
OF_A_MODEL = tuple(name for name, option in OPTIONS.items() if option.group == "Model")
"""Options that describe a model, and mean nothing beside one that was built in Python."""
HARMLESS = tuple(name for name, option in OPTIONS.items() if option.harmless)
"""Options that may change when a run is resumed."""


def taken_by_auto(name: str) -> bool:
    """Whether the recipe auto takes an option: it chooses all others."""
    return name in (*OF_DATA, "recipe", "minutes", "orderings", "seed", "device")


def with_default_recipe(given: Mapping[str, Any]) -> dict[str, Any]:
    """What is given, and the recipe auto where data are a file and nothing is said of a model or of its training.

    >>> with_default_recipe({"data": "people.csv", "minutes": 0.5})["recipe"]
    'auto'
    """
    plain = given.get("data", "mnist") == "mnist" or "recipe" in given or not all(map(taken_by_auto, given))
    return dict(given) if plain else {**given, "recipe": recipes.AUTO.name}


INITS = ("data", "biases", "random")
"""How weights may be initialised; anything else is the folder of a run whose weights are taken over."""


def find_option(name: str) -> Option:
    """An option by its name."""
    if name not in OPTIONS:
        raise ConfigError(f"there is no option {name!r}; {hint(name)}")
    return OPTIONS[name]


def hint(name: str) -> str:
    """How an option, or a setting of a constructor, of about that name is given."""
    settings = {
        setting: f"{option.name}={maker}:{setting}=VALUE"
        for option in reversed(OPTIONS.values())
        if option.registry is not None
        for maker in reversed([*option.registry])
        for setting in option.registry.settings(maker)
    }
    meant = nearest(name, [*OPTIONS, *settings])
    if meant == name and meant in OPTIONS:
        return f"give it as --set {name}=VALUE"
    if meant in settings:
        return f"{meant} is a setting, as in {settings[meant]}"
    return f"did you mean {meant!r}?" if meant else f"the options are {', '.join(OPTIONS)}"


def read_texts(texts: Mapping[str, str]) -> dict[str, Any]:
    """The values that texts stand for, by the names of options."""
    return {name: find_option(name).accept(text, read_value) for name, text in texts.items()}


def from_mapping(given: Mapping[str, Any], origin: str = "") -> Options:
    """Options from names and values, each checked; `origin` says in an error where they came from.

    The options of a recipe that they name come first.
    """
    return from_json(recipes.expanded(given), origin)


def from_json(given: Mapping[str, Any], origin: str = "") -> Options:
    """Options as `Options.to_json` gave them, among them those of a recipe, of whatever version."""
    try:
        return Options(**{find_option(name).name: value for name, value in given.items()})
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}" if origin else str(error)) from None


def read_config(path: Path) -> tuple[Options, dict[str, Any] | None]:
    """Options from a .toml file or a run's `config.json`, and the explicit model that the latter may hold."""
    if path.suffix == ".toml":
        return from_mapping(read_toml(path), str(path)), None
    content = read_config_json(path, "the configuration")
    return options_of_config(content, path), content.get("model")


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a .toml file."""
    try:
        return tomllib.loads(read_bytes(path, _MOST_TOML).decode())
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # no text, no TOML, numbers that are too long
        raise ConfigError(f"--config {path} is no readable TOML: {error}") from None


def options_of_config(content: Mapping[str, Any], path: Path) -> Options:
    """The options in the content of a `config.json`."""
    options = {
        name: value for name, value in content.items() if name not in ("version", "model", "data_format")
    }
    return from_json(options, str(path))


def read_config_json(path: Path, what: str) -> dict[str, Any]:
    """The content of a `config.json`, whose version must be one that we know."""
    content = read_json(path, what)
    version = content.get("version")
    if version != CONFIG_VERSION:
        raise ConfigError(
            f"{path} has version {version!r}, and this xorflow reads {CONFIG_VERSION}; open it with the version that wrote it, "
            "or train again"
        )
    return content
