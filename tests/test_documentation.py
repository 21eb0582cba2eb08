"""What the documents say is true: their code and commands run in order, their links lead somewhere, their words fit.

The blocks of one document share a folder, which holds a small table `people.csv`, and its Python blocks a namespace. MNIST is
cut down to a few real images, so that the commands are those of the document, word by word. Examples run as they are.
"""

from __future__ import annotations

import dataclasses
import json
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import xorflow as xf
from docs.options import filled
from research.__main__ import main as research
from tiny_runs import people_file
from xorflow.cli import main
from xorflow.cli.several import read_table
from xorflow.data.bundled import SHA256
from xorflow.training import OPTIONS

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [
        "README.md",
        "research/README.md",
        *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("**/*.md")),
    ]
)
ALL = [*PAGES, "CHANGELOG.md", "CONTRIBUTING.md"]
KEPT = {"train": 256, "validation": 64, "test": 100}
"""How many images are left of each part of MNIST."""


@dataclasses.dataclass(frozen=True)
class Code:
    """A fenced block of a document; `line` is that of its first line."""

    language: str
    text: str
    line: int


def blocks(name: str) -> Iterator[Code]:
    text = (ROOT / name).read_text(encoding="utf-8")
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        yield Code(found[1], found[2], text.count("\n", 0, found.start(2)) + 1)


def commands(block: Code) -> list[list[str]]:
    """The words of each line of a shell block, without comments."""
    return [words for line in block.text.splitlines() if (words := shlex.split(line, comments=True))]


@pytest.fixture
def small_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder with people.csv, and few digits."""
    whole = xf.data.mnist

    def few_digits(**arguments: Any) -> xf.data.Dataset:
        digits = whole(**arguments)
        parts = {name: split.subset(KEPT[name]) for name, split in digits.parts.items()}
        return dataclasses.replace(digits, **parts)

    monkeypatch.setattr(xf.data, "mnist", few_digits)
    monkeypatch.chdir(tmp_path)
    people_file(tmp_path / "people.csv")


PROGRAMS = {("xorflow",): main, ("python", "-m", "research"): research}


def run_command(words: list[str], where: str) -> None:
    """A command of the library or of research; others are left to the reader."""
    program = next((program for program in PROGRAMS if tuple(words[: len(program)]) == program), None)
    if program is None:
        return
    with pytest.raises(SystemExit) as stop:
        PROGRAMS[program](words[len(program) :])
    assert stop.value.code == 0, f"{where}: {shlex.join(words)}"


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.usefixtures("small_world")
def test_code_and_commands_run_in_order(name: str) -> None:
    namespace: dict[str, Any] = {"__name__": name}
    for block in blocks(name):
        if block.language == "python":
            lines = "\n" * (block.line - 1) + block.text  # so that an error has the line of the document
            exec(compile(lines, str(ROOT / name), "exec"), namespace)
        elif block.language == "toml":
            table = Path("table.toml")
            table.write_text(block.text, encoding="utf-8")
            assert read_table(table) is not None, f"{name}: a table of runs"
        elif block.language == "sh":
            for words in commands(block):
                run_command(words, name)


@pytest.mark.usefixtures("small_world")
def test_the_examples_of_a_help_work_as_typed(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    run_command(["xorflow", "train", "--help"], "help")
    examples = re.findall(r"^ xorflow (train .+?) *$", capfd.readouterr().out, flags=re.MULTILINE)
    assert len(examples) == 2
    for line in examples:
        run_command(["xorflow", *shlex.split(line)], "an example")


@pytest.mark.parametrize("name", ALL)
def test_blocks_are_of_a_kind_that_is_checked(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    fences = re.findall(r"^```.*$", text, flags=re.MULTILINE)
    found = list(blocks(name))
    assert len(fences) == 2 * len(found)
    assert {block.language for block in found} <= {"python", "sh", "toml"}


TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))


@pytest.mark.parametrize("name", ALL)
def test_what_make_is_asked_for_exists(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    asked = {
        words[1] for b in blocks(name) if b.language == "sh" for words in commands(b) if words[0] == "make"
    }
    assert asked | set(re.findall(r"`make (\w+)`", text)) <= TARGETS


@pytest.mark.parametrize("name", ALL)
def test_relative_links_and_images_exist(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            assert target.startswith("https://"), target
            continue
        path, _, anchor = target.partition("#")
        linked = (ROOT / name).parent / path if path else ROOT / name
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}, target


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    for path in (ROOT / "docs").glob("*.md"):
        assert path.name == "README.md" or f"]({path.name})" in index


def test_the_page_of_options_has_all_of_them_as_they_are_declared() -> None:
    page = (ROOT / "docs/options.md").read_text(encoding="utf-8")
    assert page == filled(page), "run: make docs"


def test_options_named_in_the_text_exist(xorflow_help: str) -> None:
    for name in PAGES:
        text = (ROOT / name).read_text(encoding="utf-8")
        for option in re.findall(r"`(--[a-z][a-z-]*)", text):
            assert re.search(rf"{option}\b(?!-)", xorflow_help), f"{name}: {option}"
        for option in re.findall(r"--set ([a-z][a-z_]*)=", text):
            assert option in OPTIONS, f"{name}: --set {option}"


@pytest.fixture
def xorflow_help(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "200")
    names = ("train", "evaluate", "sample", "score", "combine")
    for words in (["--help"], *([name, "--help"] for name in names)):
        run_command(["xorflow", *words], "help")
    for name in ("paper", "estimators"):
        run_command(["python", "-m", "research", name, "--help"], "help")
    return capfd.readouterr().out


def fields(value: dict[str, Any]) -> set[str]:
    return set(value) | {key for part in ("test", "validation") for key in value.get(part, {})}


def test_every_field_of_a_result_is_explained() -> None:
    page = (ROOT / "docs/getting_started.md").read_text(encoding="utf-8")
    table = page[page.index("### The fields of `result.json`") :]
    result = json.loads((ROOT / "research/results/demo/result.json").read_text(encoding="utf-8"))
    first_cells = " ".join(re.findall(r"^\|([^|]*)\|", table, flags=re.MULTILINE))
    explained = set(re.findall(r"`(\w+)`", first_cells))
    elsewhere = {"samples", "ess", "elbo_nll"}  # of a bound, a posterior
    elsewhere |= {"how", "runs", "seeds"}  # of combined ones
    elsewhere |= {"warning", "not_captured"}  # of runs that went otherwise than hoped
    assert explained == fields(result) | elsewhere


def test_the_checked_content_of_mnist_is_that_of_the_page() -> None:
    page = (ROOT / "docs/data.md").read_text(encoding="utf-8")
    assert dict(re.findall(r"^\| `([\w-]+-ubyte)` \| `(\w{64})` \|$", page, flags=re.MULTILINE)) == SHA256


def test_every_promise_names_its_test_and_the_tests_exist() -> None:
    page = (ROOT / "docs/promises.md").read_text(encoding="utf-8")
    promises = re.split(r"\n- \*\*", page)[1:]
    assert len(promises) >= 15
    for promise in promises:
        own = promise.split("\n\n")[0]
        assert "`tests/" in own, f"no test is named: {own[:80]}"
    for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page):
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), (
            f"{path}::{name}"
        )


# ---- the scripts in examples/ run as they are, on small data ----


SCRIPTS = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
@pytest.mark.usefixtures("small_world")
def test_an_example_runs(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(script))
    assert "nats" in capsys.readouterr().out
