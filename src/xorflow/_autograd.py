"""Functions with a gradient of our own."""

from __future__ import annotations

import inspect
from typing import Any

import torch


class Function(torch.autograd.Function):
    """torch's, with the signature of `forward` looked up once: torch does it in every call, and small networks wait for it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.forward.__signature__ = inspect.signature(cls.forward)  # pyright: ignore[reportFunctionMemberAccess]
