"""Which estimators are studied unless told otherwise, and how a person names others."""

from __future__ import annotations

import re
from collections.abc import Sequence

from xorflow import ConfigError
from xorflow.training import build_estimator

POINTS = ("start", "middle", "converged")
"""Of training, at which models are studied."""

PAPER_CONTROLS: tuple[str, ...] = (
    "special-case",
    "special-case:baseline=greedy",
    "special-case:baseline=sampled",
)
"""The paper's control variates that leave the gradient unbiased: a running mean, and its two self-critics."""

REFERENCES: dict[str, tuple[str, ...]] = {
    "generator": PAPER_CONTROLS,
    "posterior": ("full-posterior", "full-posterior:baseline=greedy"),
}
"""By what draws the choices: the paper's control variates, the best of which others are measured by."""

_ANY_DEPTH: tuple[str, ...] = (
    "maximum-likelihood",
    "straight-through",
    "special-case:baseline=none",
    "special-case:rewards=all,baseline=none",
    "special-case:rewards=all",
    *PAPER_CONTROLS,
    "special-case:standardise=one",
    "special-case:rewards=impatient,baseline=none,standardise=feature",
    "leave-one-out:samples=2",
    "leave-one-out:samples=4",
    "vimco:samples=2",
    "vimco:samples=4",
    "vimco:samples=4,sum_last=true",
    "disarm",
    "arms:samples=4",
    "double-cv:samples=2",
    "rebar",
    "relax",
    "local-expectation:limit=784",
    "reinmax",
    "st-gumbel",
    "concrete",
    "proposal-prefix",
    "proposal-prefix:sum_last=true",
)
_ONE_LAYER: tuple[str, ...] = ("analytic",)
_SEVERAL_LAYERS: tuple[str, ...] = (
    "special-case:rewards=impatient",
    "special-case:sum_last=true",
    "leave-one-out:samples=4,sum_last=true",
    "disarm:sum_last=true",
    "arms:samples=4,sum_last=true",
    "double-cv:samples=2,sum_last=true",
    "rebar:sum_last=true",
    "relax:sum_last=true",
)
_POSTERIOR: tuple[str, ...] = (
    "full-posterior:baseline=none",
    "full-posterior",
    "full-posterior:baseline=greedy",
    "full-posterior:kl=suffix",
    "full-posterior:kl=vanilla",
    "full-posterior:kl=printed",
    "full-posterior:sum_last=true",
    "leave-one-out:samples=4,proposal=q",
    "vimco:samples=2,proposal=q",
    "vimco:samples=4,proposal=q",
)
_POSTERIOR_OF_SEVERAL: tuple[str, ...] = (
    "full-posterior:rewards=impatient",
    "vimco:samples=4,proposal=q,sum_last=true",
)
_THREE_LAYERS: tuple[str, ...] = ("disarm:sum_last=true,common=true",)
_POSTERIOR_OF_THREE: tuple[str, ...] = ("full-posterior:local=true",)
"""With fewer layers these are the same as without their last option."""


def default_estimators(depth: int, *, posterior: bool, alone: bool = False) -> tuple[str, ...]:
    """What is measured on a model: the zoo with its sensible variants.

    Args:
        depth: the model's.
        posterior: whether it has one.
        alone: only what needs the posterior.
    """
    without = _ANY_DEPTH + (_ONE_LAYER if depth == 1 else _SEVERAL_LAYERS)
    of_posterior = _POSTERIOR + (("analytic:objective=elbo",) if depth == 1 else _POSTERIOR_OF_SEVERAL)
    if depth > 2:
        without, of_posterior = without + _THREE_LAYERS, of_posterior + _POSTERIOR_OF_THREE
    return (() if alone else without) + (of_posterior if posterior else ())


def parse_estimators(given: Sequence[str] | None) -> tuple[str, ...] | None:
    """The estimators that a person names, each checked; None for the default ones.

    Names may be separated by spaces, semicolons or commas: a comma followed by KEY=VALUE belongs to the estimator before it.

    >>> parse_estimators(["disarm, special-case:baseline=greedy,sum_last=true maximum-likelihood"])
    ('disarm', 'special-case:baseline=greedy,sum_last=true', 'maximum-likelihood')
    """
    if not given:
        return None
    names = [name for text in given for name in re.split(r"[\s;]+|,(?![a-z_]+=)", text) if name]
    if not names:
        raise ConfigError("--estimators names none; as in --estimators 'disarm leave-one-out:samples=4'")
    for name in names:
        build_estimator(name)
    return tuple(dict.fromkeys(names))
