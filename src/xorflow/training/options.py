"""All options of a run, with defaults and rules: one flat table for the command line, files and Python."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xorflow.errors import ConfigError
from xorflow.training import recipes
from xorflow.training.storage import read_json

CONFIG_VERSION = 3


@dataclass(frozen=True)
class Options:
    """Everything that a run depends on; `config.json` holds all of it.

    Attributes:
        data: `mnist`, or a .npy, .npz or .csv file.
        categories: how many values every column of a file has, the integers from 0; by default those that occur. For
            images some of whose pixels never vary.
        validation: rows (or a fraction below 1) that validate; by default 10,000 of MNIST, a tenth of a file.
        test: rows (or a fraction) of a file that test.
        data_seed: names the binarisation of the evaluation sets, or the split of a file.
        label: condition on MNIST's labels.
        recipe: `none`, or a set of options by its name; options given beside it override its own. See xorflow recipes.
        layers: the depth L.
        conditioner: `made`, `coupling`, `transformer` or `recurrent`.
        hidden: widths of the hidden layers of a MADE or a coupling.
        width: of the vectors of a transformer, by default 256, or a recurrent network, by default 512.
        blocks: of a transformer, by default 8, or layers of a recurrent network, by default 1.
        heads: of a transformer's attention.
        cell: of a recurrent network, `gru` or `lstm`.
        dropout: the share of a transformer's or a recurrent network's units left out in training.
        rotary: a transformer's attention sees how far away things are.
        skip: a transformer or a recurrent network takes no step for features that have another value than their usual one in at
            most this share of rows (0: it takes all).
        reach: how many rows and columns around a pixel those two see directly; by default 2 for images.
        order: `natural`, `reversed`, `alternating`, `random`, `random:SEED`, of images also `columns`, `columns-reversed`,
            `outward` and `inward`; or one a layer, with commas.
        mixture: `none`; or the orderings, with commas, of several flows that are mixed; or how many orderings.
        shared: the flows of a mixture share one network, if that is a transformer or a recurrent one.
        mask: of couplings, `checkerboard`, `halves`, `alternate` or `random`, every second layer flips it; or `nested` grids.
        direct: connections from input to output in each MADE.
        variant: layers see the running `state`, or each the choices of the layer before, a `chain`, in one ordering.
        own: each MADE also sees the choices of its own layer that came before.
        posterior: `none`; or `mlp`, which sees all data, `made`, those up to d; or a correction of the generator, `linear` in
            all data, `diagonal` in each feature's own value.
        transform: `shift` or `affine` (modulo K).
        base: `learned` or `fixed`.
        p0: the base's probability of category 0, the first one if learned; by default 0.9, learned 0.998.
        init: `data` begins at independent features, posteriors at Bayes' rule; `biases` with the generators' output biases
            alone at the data's frequencies, `random` as the networks come; or RUN, the folder of a finished run, whose layers
            become the last ones, the others near the identity, and whose base is taken over unless p0 is given.
        estimator: its name, with options as in `maximum-likelihood:samples=8`.
        epochs: passes over the training data.
        batch_size: rows a step.
        accumulate: how many parts the rows of a step pass in, one after the other, to save memory.
        lr: the highest learning rate.
        schedule: `cosine` to zero, or `constant`; both after the warm-up.
        warmup: steps over which the learning rate rises.
        optimiser: `adam`, `adamw`, `sgd`; or `muon`, AdamW but for matrices within transformers and recurrent networks.
        weight_decay: of matrices, not of biases, embeddings or the base.
        clip: the largest norm of the gradient (0: unlimited).
        average: decay of the exponential average of the weights, which is then what is evaluated (0: none).
        seed: of weights, order of rows, and noise.
        device: `auto`, `cpu`, `cuda`, `cuda:1`, `mps`.
        precision: of training: `auto` (`tf32` on CUDA), `32-true`, `tf32` (of matrix products), `bf16-mixed`, `16-mixed` or
            `64-true`.
        compile: compile a transformer's blocks on CUDA: a minute at the start, and quicker steps. Elsewhere it does nothing.
        validate_every: epochs between validations.
        select: the weights kept are best on validation data by `likelihood`, or by that of the `greedy` flow.
        checkpoint_seconds: how often, at least, progress is saved.
        evaluation_samples: S of the importance-sampled bound, where there is no exact likelihood.
        tensorboard: also write TensorBoard event files.
    """

    data: str = "mnist"
    categories: int | None = None
    validation: float | None = None
    test: float = 0.1
    data_seed: int = 0
    label: bool = False
    recipe: str = recipes.NONE
    layers: int | None = 1
    conditioner: str = "made"
    hidden: tuple[int, ...] = (1024,)
    width: int | None = None
    blocks: int | None = None
    heads: int = 8
    cell: str = "gru"
    dropout: float = 0.1
    rotary: bool = False
    skip: float = 0.0
    reach: int | None = None
    order: str = "natural"
    mixture: str = "none"
    shared: bool = True
    mask: str = "checkerboard"
    direct: bool = False
    variant: str = "state"
    own: bool = False
    posterior: str = "none"
    transform: str = "shift"
    base: str = "learned"
    p0: float | None = None
    init: str = "data"
    estimator: str = "maximum-likelihood"
    epochs: int = 30
    batch_size: int = 128
    accumulate: int = 1
    lr: float = 1e-3
    schedule: str = "cosine"
    warmup: int = 0
    optimiser: str = "adam"
    weight_decay: float = 0.0
    clip: float = 0.0
    average: float = 0.0
    seed: int = 0
    device: str = "auto"
    precision: str = "auto"
    compile: bool = False
    validate_every: int = 1
    select: str = "likelihood"
    checkpoint_seconds: float = 30.0
    evaluation_samples: int = 64
    tensorboard: bool = False

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_ranges()
        self._check_network()
        self._check_init()
        recipes.check_data(self.recipe, self.data)

    def _check_choices(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} is one of {', '.join(allowed)}; got {getattr(self, name)!r}")

    def _check_ranges(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not value >= least:  # also refuses nan
                raise ConfigError(f"{name} is at least {least}; got {value}")
            if isinstance(value, int) and name not in _SEEDED and value >= _MOST:
                raise ConfigError(f"{name} is below 2^31; got {value}")
        for name in _SEEDED:
            if getattr(self, name) >= _SEEDS:
                raise ConfigError(f"{name} is below 2^40; got {getattr(self, name)}")
        if not 0 <= self.average < 1:
            raise ConfigError(f"average is a decay of at least 0 and below 1; got {self.average}")
        if not 0 <= self.skip < 1:
            raise ConfigError(f"skip is a share of rows, at least 0 and below 1; got {self.skip}")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout is a share of at least 0 and below 1; got {self.dropout}")
        if self.p0 is not None and not 0 < self.p0 < 1:
            raise ConfigError(f"p0 is a probability strictly between 0 and 1; got {self.p0}")
        if not 0 < self.lr < math.inf:
            raise ConfigError(f"lr is a number greater than 0; got {self.lr}")
        if any(not 1 <= width < 2**63 for width in self.hidden):
            raise ConfigError(f"hidden widths are at least 1 and below 2^63; got {list(self.hidden)}")

    def _check_network(self) -> None:
        """Options that would have no effect."""
        if self.mixture != "none" and self.order != "natural":
            raise ConfigError(
                "the orderings of a mixture are those that --mixture names, and --order is of a single flow; got "
                f"{self.order!r}: leave --order out"
            )
        if self.cell != "gru" and self.conditioner != "recurrent":
            raise ConfigError(
                "--cell is of recurrent networks; leave it out, or give --conditioner recurrent"
            )
        if self.rotary and self.conditioner != "transformer":
            raise ConfigError(
                "--rotary is of transformers; leave it out, or give --no-rotary beside a recipe that has it"
            )
        if self.skip and self.conditioner not in ("transformer", "recurrent"):
            raise ConfigError(
                "--skip is of transformers and recurrent networks; leave it out, or give --skip 0 beside a recipe that has it"
            )

    def _check_init(self) -> None:
        if self.init not in INITS and "/" not in self.init and "\\" not in self.init:
            raise ConfigError(
                f"init is one of {', '.join(INITS)}, or the folder of a run, written with a slash, as in ./runs/demo; "
                f"got {self.init!r}"
            )

    def to_json(self) -> dict[str, Any]:
        """As `config.json` holds them."""
        return dataclasses.asdict(self) | {"hidden": list(self.hidden)}

    def without_model(self) -> Options:
        """Of a run whose model is built in Python: those that describe a model have their defaults, and `layers` is None."""
        usual = Options()
        return self.replace(**{name: getattr(usual, name) for name in OF_A_MODEL} | {"layers": None})

    def replace(self, **changes: Any) -> Options:
        """A copy with some options changed, checked."""
        if changes.get("recipe") != self.recipe:
            changes = recipes.expanded(changes)
            recipes.check_alone(self.recipe, changes.get("recipe", recipes.NONE))
        return from_json(self.to_json() | changes, "the options given")


OF_DATA = ("data", "categories", "validation", "test", "data_seed", "label")
OF_A_MODEL = (
    *(
        "recipe",
        "layers",
        "conditioner",
        "hidden",
        "width",
        "blocks",
        "heads",
        "cell",
        "dropout",
        "rotary",
        "skip",
        "reach",
    ),
    *("order", "mixture", "shared", "mask", "direct"),
    *("variant", "own", "posterior", "transform", "base", "p0"),
)
"""Options that describe a model, and mean nothing beside one that was built in Python."""

INITS = ("data", "biases", "random")
"""How weights may be initialised; anything else is the folder of a run whose weights are taken over."""

_MOST = 2**31  # of whatever is counted: more is a slip of the finger

_SEEDED = ("seed", "data_seed")
_SEEDS = 2**40  # room for the number of an epoch beside the seed

_CHOICES = {
    "conditioner": ("made", "coupling", "transformer", "recurrent"),
    "cell": ("gru", "lstm"),
    "variant": ("state", "chain"),
    "posterior": ("none", "mlp", "made", "linear", "diagonal"),
    "transform": ("shift", "affine"),
    "base": ("learned", "fixed"),
    "schedule": ("cosine", "constant"),
    "optimiser": ("adam", "adamw", "muon", "sgd"),
    "select": ("likelihood", "greedy"),
    "precision": ("auto", "32-true", "tf32", "bf16-mixed", "16-mixed", "64-true"),
}

_LEAST = {
    "categories": 2,
    "validation": 0,
    "test": 0,
    "data_seed": 0,
    "layers": 1,
    "width": 1,
    "blocks": 1,
    "heads": 1,
    "reach": 0,
    "epochs": 1,
    "batch_size": 1,
    "accumulate": 1,
    "warmup": 0,
    "weight_decay": 0,
    "clip": 0,
    "seed": 0,
    "validate_every": 1,
    "checkpoint_seconds": 0,
    "evaluation_samples": 1,
}

HARMLESS = ("device", "checkpoint_seconds", "tensorboard", "evaluation_samples")
"""Options that may change when a run is resumed: they do not touch what is learned on one device."""


def from_mapping(values: Mapping[str, Any], origin: str) -> Options:
    """Options from names and values, each checked; `origin` says in an error where they came from.

    The options of a recipe that they name come first.
    """
    return from_json(recipes.expanded(values), origin)


def from_json(values: Mapping[str, Any], origin: str) -> Options:
    """Options as `Options.to_json` gave them, among them those of a recipe, of whatever version."""
    fields = {field.name: field for field in dataclasses.fields(Options)}
    unknown = [name for name in values if name not in fields]
    if unknown:
        raise ConfigError(f"{origin}: there is no option {unknown[0]!r}; the options are {', '.join(fields)}")
    converted = {
        name: _convert(name, str(fields[name].type), value, origin) for name, value in values.items()
    }
    return Options(**converted)


_KINDS: dict[str, tuple[tuple[type, ...], Callable[[Any], Any], str]] = {
    "bool": ((bool,), bool, "true or false"),
    "int": ((int,), int, "a whole number"),
    "float": ((int, float), float, "a number"),
    "str": ((str,), str, "a text"),
    "tuple[int, ...]": ((list, tuple), tuple, "a list of whole numbers"),
}
"""By the annotation of a field: the types that may come, the one that is kept, and its name in messages."""


def _convert(name: str, annotation: str, value: Any, origin: str) -> Any:
    if value is None and "None" in annotation:
        return None
    accepted, make, expected = _KINDS[annotation.removesuffix(" | None")]
    wrong = not isinstance(value, accepted) or (isinstance(value, bool) and bool not in accepted)
    if wrong or (isinstance(value, list | tuple) and not all(type(item) is int for item in value)):
        raise ConfigError(f"{origin}: {name} is {expected}; got {value!r}")
    return make(value)


def read_config(path: Path) -> tuple[Options, dict[str, Any] | None]:
    """Options from a .toml file or a run's `config.json`, and the explicit model that the latter may hold."""
    if path.suffix == ".toml":
        return from_mapping(read_toml(path), str(path)), None
    values = read_json(path, "the configuration")
    return options_of_config(values, path), values.get("model")


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a .toml file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"--config names a file that is not there: {path}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--config {path} is no readable TOML: {error}") from None


def options_of_config(values: Mapping[str, Any], path: Path) -> Options:
    """The options in the content of a `config.json`, whose version must be one that we know."""
    check_version(values, path)
    options = {
        name: value for name, value in values.items() if name not in ("version", "model", "data_format")
    }
    return from_json(options, str(path))


def check_version(values: Mapping[str, Any], path: Path) -> None:
    """Refuse the content of a `config.json` that this version cannot read."""
    version = values.get("version")
    if version != CONFIG_VERSION:
        raise ConfigError(
            f"{path} has version {version!r}, this xorflow reads version {CONFIG_VERSION}; {_origin(version)}"
        )


def _origin(version: object) -> str:
    if isinstance(version, int) and 1 <= version < CONFIG_VERSION:
        return "an earlier xorflow wrote it, whose options had other names: train again, or open it with that version"
    is_newer = isinstance(version, int) and version > CONFIG_VERSION
    return "a newer xorflow wrote it: install that" if is_newer else "xorflow did not write it"
