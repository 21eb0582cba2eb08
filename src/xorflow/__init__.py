"""Normalising flows on discrete data: exact likelihoods, latent transformations, and the estimators that train them."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xorflow._public import *  # noqa: F403

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Modules and public names come when they are first asked for: `xorflow --help` needs none of them, and no torch."""
    if find_spec(f"{__name__}.{name}") is not None:
        return import_module(f"{__name__}.{name}")
    return getattr(import_module(f"{__name__}._public"), name)


def __dir__() -> list[str]:
    return [*import_module(f"{__name__}._public").__all__, "__version__"]
