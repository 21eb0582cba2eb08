"""Doors where options come in: from the command line, TOML, and the `config.json` of another run."""

from __future__ import annotations

import json
from typing import Any, Literal, get_args, get_origin

from attack.damage import HUGE, TEXTS, VALUES, Chance, damaged_bytes, damaged_json, json_bytes
from attack.rule import Case, require, require_finite_scores, require_trained
from attack.world import FINISHED, KINDS
from command_line import SMALL
from xorflow.training import OPTIONS, Registry
from xorflow.training.registry import value_text

# ---- values ----


_WORDS = (
    *(
        "natural",
        "reversed",
        "alternating",
        "random",
        "random:3",
        "random:-1",
        "columns",
        "natural,random",
        "2",
        "3",
        "65",
    ),
    *(
        "mnist",
        "none",
        "data",
        "biases",
        "random:x",
        "cpu",
        "auto",
        "cuda:9",
        "demo",
        "recurrent@4",
        "./none",
        "outward",
    ),
)
"""What options of texts take."""


def option_text(name: str, chance: Chance) -> str:
    """What may be typed for an option: what it takes, nearly that, or anything."""
    option, how = OPTIONS[name], chance.random()
    if how < 0.3:
        return chance.choice(TEXTS)
    if option.registry is not None:
        return call_text(option.registry, chance)
    if get_origin(option.type) is Literal:
        return chance.choice(get_args(option.type))
    if option.type is bool:
        return chance.choice(("true", "false"))
    if option.type is str:
        return chance.choice(_WORDS)
    edge = chance.choice([*option.range.values()] or [0])
    return value_text(
        chance.choice((edge, edge + 1, edge - 1, 0, 1, 2, 3, 7, 0.5, 0.1, 1e-3, 40, -2.5, 1e30))
    )


def call_text(registry: Registry, chance: Chance) -> str:
    """A name with settings, some of them wrong."""
    name = chance.choice([*registry, *registry, "cnn", ""])
    if name not in registry:
        return name
    items = []
    inner = [key for one in registry.inner.values() for each in one for key in one.settings(each)]
    known = [*registry.settings(name), *inner]
    for key in chance.sample(known, min(len(known), chance.choice((0, 0, 1, 1, 2, 3)))):
        if key in registry.inner and chance.random() < 0.7:
            value = chance.choice([*registry.inner[key]])
        else:
            numbers = (
                "0",
                "1",
                "2",
                "4",
                "8",
                "-1",
                "0.5",
                "0.0",
                "1.0",
                "1e-3",
                "true",
                "false",
                "none",
                "4+4",
                "+",
                "3",
            )
            value = chance.choice(
                (*numbers, *numbers, "gru", "halves", "checkerboard", "random", "65536", chance.choice(TEXTS))
            )
        items.append(f"{key}={value}")
    if chance.random() < 0.1:
        items.append(chance.choice(("magic=1", "=", "hidden", "name=made", ",", "features=3")))
    return f"{name}:{','.join(items)}"


def _given(name: str, text: str, chance: Chance) -> tuple[str, ...]:
    """An option on the command line; a text that would be taken for another option is joined to its name."""
    flag = f"--{name.replace('_', '-')}"
    if not OPTIONS[name].flag or chance.random() < 0.3:
        return "--set", f"{name}={text}"
    return (f"{flag}={text}",)


# ---- doors ----


def train(case: Case) -> None:
    """`train` with up to four options of any value."""
    chance, kind = case.chance, case.chance.choice(("rows", "people", "images"))
    words = ["--data", getattr(case.world, kind), *SMALL, "--epochs", "1", "--out", "run"]
    for name in chance.sample([*OPTIONS], chance.choice((1, 1, 2, 3, 4))):
        words += _given(name, option_text(name, chance), chance)
    seeds = (
        f"--seeds={chance.choice(_SEEDS)}",
        "--jobs",
        "0",
    )  # several runs are processes; what they begin with is read here
    words += chance.choice(
        (
            (),
            (),
            (),
            (),
            ("--resume",),
            ("--jobs", chance.choice(("0", "-1", "2", HUGE))),
            ("--magic",),
            seeds,
        )
    )
    outcome = case.command("train", *words, writes=("run",), stop_after=2)
    _require_whole(case, outcome.code)


def toml(case: Case) -> None:
    """A .toml file of options, and damaged ones."""
    chance = case.chance
    lines = [
        f'data = "{case.world.rows}"',
        "evaluation_samples = 4",
        "epochs = 1",
        'device = "cpu"',
        'conditioner = "made:hidden=8"',
    ]
    for name in chance.sample([*OPTIONS], chance.choice((1, 2, 3))):
        value = chance.choice((option_text(name, chance), option_text(name, chance), *VALUES))
        lines.append(f"{name} = {_toml_value(value, chance)}")
    chance.shuffle(lines)
    if chance.random() < 0.2:
        lines.insert(
            0,
            chance.choice(
                ("[[runs]]", "[a.b]", "x = [[1, 2], {a = 1979-05-27}]", f"x = {HUGE}", "'' = 1", "é = 1")
            ),
        )
    content = "\n".join(lines).encode("utf-8", "surrogatepass")
    if chance.random() < 0.4:
        content, what = damaged_bytes(content, chance)
        case.note(what)
    _config(case, "options.toml", content)


def config_json(case: Case) -> None:
    """The configuration of another run, edited."""
    kind = case.chance.choice([*KINDS])
    value: Any = json.loads((case.world.run(kind) / "config.json").read_text(encoding="utf-8"))
    for _ in range(case.chance.choice((1, 1, 2))):
        value, what = damaged_json(value, case.chance)
        case.note(kind, what)
    _config(case, "config.json", json_bytes(value, case.chance))


def readers(case: Case) -> None:
    """`evaluate`, `sample`, `score`, `combine` and `recipes`, their options with any value."""
    chance = case.chance
    kind = chance.choice(FINISHED)
    command = chance.choice(("evaluate", "sample", "score", "score", "combine", "recipes"))
    run = chance.choice((case.world.run(kind),) * 6 + (case.world.run("unfinished"), *TEXTS))
    words: list[object] = (
        [command] if command == "recipes" else [command, "--", run] if str(run)[:1] == "-" else [command, run]
    )
    known = _OF_READERS[command]
    for name in chance.sample([*known], min(len(known), chance.choice((0, 1, 1, 2, 3)))):
        value = chance.choice((*known[name], chance.choice(TEXTS)))
        words.insert(1, name if value is None else f"{name}={value}")
    rows = chance.choice((case.world.rows, case.world.people, case.world.images))
    words[1:1] = {"score": [f"--data={rows}"], "combine": [case.world.run(kind), "--out=out"]}.get(
        command, []
    )
    if command in ("sample", "score") and chance.random() < 0.3:
        words = [word for word in words if not str(word).startswith("--out=")]
        words.insert(1, "--out=mine.csv")  # which is there
    (case.folder / "mine.csv").write_text("mine", encoding="utf-8")
    outs = (
        "new.csv",
        "new.npy",
        "new.png",
        "samples.csv",
        "samples.npy",
        "samples.png",
        "samples.parquet",
        "out",
        "new.CSV",
        "é🙂.csv",
    )
    outs += ("mine.csv",) if "--force" in words else ()
    outs += tuple(
        text for text in TEXTS if text[:1] not in ("/", ".", "-", "")
    )  # a file of any name may be asked for
    outcome = case.command(*words, writes=outs, stop_after=5)
    if outcome.code == 0 and command == "score" and outcome.out.startswith("{"):
        require_finite_scores(outcome.json())


def first_words(case: Case) -> None:
    """What stands first is no command, or there is too much or too little."""
    chance = case.chance
    words = [
        chance.choice((*TEXTS, "train", "score", "--help", "--version", "-h", "evaluate"))
        for _ in range(chance.randrange(4))
    ]
    if (
        [word for word in words if word != "--"][:1] == ["train"]
        and "--help" not in words
        and "-h" not in words
    ):
        words += ["--epochs", "0"]  # all else might be a good command
    case.command(*words, stop_after=5)


_SEEDS = (
    "",
    "0-",
    "5-2",
    "0,0",
    "-1",
    "x",
    "0-99999999999",
    "1.5",
    "0-9223372036854775807",
    "2-3",
    "0,1",
    HUGE,
    *TEXTS[:10],
)
_PATHS = ("new.csv", "new.npy", "new.png", "mine.csv", "new.CSV", "none/x.csv", ".", "é🙂.csv")
_COUNTS = ("0", "1", "3", "-1", "1e3", "2147483648", "9223372036854775808")
_FLOWS = ("latent", "deterministic", "refitted", "LATENT", "")
_DEVICES = ("cpu", "auto", "cuda", "cuda:1", "mps", "meta", "cpu:0", "xla")
_MEMORIES = ("1", "9kB", "500MB", "2GB", "0", "-1", "1e9", "1.5.5GB", f"{HUGE}GB")
_OF_READERS: dict[str, dict[str, tuple[str | None, ...]]] = {
    "evaluate": {"--samples": ("1", "2", "0", "-1"), "--memory": _MEMORIES, "--device": _DEVICES, "--json": (None,)},
    "sample": {
        "--count": _COUNTS, "--seed": _COUNTS, "--out": _PATHS, "--flow": _FLOWS, "--device": _DEVICES, "--json": (None,),
        "--force": (None,),
    },
    "score": {
        "--data": ("none.csv",), "--out": _PATHS, "--flow": _FLOWS, "--samples": ("1", "2", "0"), "--memory": _MEMORIES,
        "--device": _DEVICES, "--json": (None,), "--force": (None,),
    },
    "combine": {"--out": ("out", "mine.csv", "."), "--device": _DEVICES},
    "recipes": {"--json": (None,)},
}  # fmt: skip


def _toml_value(value: Any, chance: Chance) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False) if chance.random() < 0.7 else value
    return json.dumps(value).replace("null", '"none"').replace("NaN", "nan").replace("Infinity", "inf")


def _config(case: Case, name: str, content: bytes) -> None:
    (case.folder / name).write_bytes(content)
    words = ("train", "--config", name, "--out", "run", "--epochs", "1", "--device", "cpu")
    if b"runs" in content and b"[[" in content:
        words = (*words, "--jobs", "0")  # several runs are processes; whether their table is read is the same
    _require_whole(case, case.command(*words, writes=("run",), stop_after=2).code)


def _require_whole(case: Case, code: int) -> None:
    """Of a command that trains: its folder has a whole run, one to be continued, or is not there."""
    run = case.folder / "run"
    if code == 0:
        require_trained(case, run)
    elif run.exists():
        require((run / "config.json").exists(), "made", "a folder that is no run")
