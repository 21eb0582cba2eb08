"""The library knows nothing of research, and research uses only what the library makes public."""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "research").rglob("*.py"))
SOURCE = sorted((ROOT / "src").rglob("*.py"))


def imported(path: Path) -> list[tuple[str, str | None]]:
    """Modules, and names out of them, that a file imports."""
    found: list[tuple[str, str | None]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [(node.module or "", alias.name) for alias in node.names]
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_research_imports_public_names_alone(path: Path) -> None:
    for module, name in imported(path):
        if module.partition(".")[0] == "xorflow" and (module, name) != ("xorflow", None):
            public = importlib.import_module(module).__all__
            assert name in public, f"{module}.{name} is not public"


def test_the_library_never_mentions_research() -> None:
    for path in SOURCE:
        assert not [module for module, _ in imported(path) if module.partition(".")[0] == "research"], path
        text = path.read_text(encoding="utf-8")
        assert "-m research" not in text, path
        assert "research/" not in text, path
