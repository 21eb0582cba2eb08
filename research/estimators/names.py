"""Which estimators are studied unless told otherwise, and how a person names others."""

from __future__ import annotations

import re
from collections.abc import Sequence

from xorflow import ConfigError
from xorflow.training import build_estimator

POINTS = ("start", "middle", "converged")
"""Of training, at which models are studied."""

PAPER_CONTROLS = (
    "score-function",
    "score-function:baseline=greedy",
    "score-function:baseline=sampled",
)
"""The paper's control variates that leave the gradient unbiased: a running mean, and its two self-critics."""

REFERENCES: dict[str, tuple[str, ...]] = {
    "generator": PAPER_CONTROLS,
    "posterior": ("score-function:objective=elbo", "score-function:objective=elbo,baseline=greedy"),
}
"""By what draws the choices: the paper's control variates, the best of which others are measured by."""

_ANY_DEPTH = (
    "maximum-likelihood",
    "straight-through",
    "score-function:baseline=none",
    "score-function:credit=all,baseline=none",
    "score-function:credit=all",
    *PAPER_CONTROLS,
    "score-function:standardise=one",
    "score-function:credit=impatient,baseline=none,standardise=feature",
    "score-function:baseline=leave-one-out,samples=2",
    "score-function:baseline=leave-one-out,samples=4",
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
_ONE_LAYER = ("analytic",)
_SEVERAL_LAYERS = (
    "score-function:credit=impatient",
    "score-function:sum_last=true",
    "score-function:baseline=leave-one-out,samples=4,sum_last=true",
    "disarm:sum_last=true",
    "arms:samples=4,sum_last=true",
    "double-cv:samples=2,sum_last=true",
    "rebar:sum_last=true",
    "relax:sum_last=true",
)
_POSTERIOR = (
    "score-function:objective=elbo,baseline=none",
    "score-function:objective=elbo",
    "score-function:objective=elbo,baseline=greedy",
    "score-function:objective=elbo,divergence=cross-entropy",
    "score-function:objective=elbo,divergence=sampled,credit=all",
    "score-function:objective=elbo,divergence=cross-entropy,credit=printed-divergence",
    "score-function:objective=elbo,sum_last=true",
    "score-function:objective=elbo,baseline=leave-one-out,samples=4",
    "vimco:samples=2,proposal=q",
    "vimco:samples=4,proposal=q",
)
_POSTERIOR_OF_SEVERAL = (
    "score-function:objective=elbo,credit=impatient",
    "vimco:samples=4,proposal=q,sum_last=true",
)
_THREE_LAYERS = ("disarm:sum_last=true,common=true",)
_POSTERIOR_OF_THREE = ("score-function:objective=elbo,credit=local-divergence",)
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

    >>> parse_estimators(["disarm, score-function:baseline=greedy,sum_last=true maximum-likelihood"])
    ('disarm', 'score-function:baseline=greedy,sum_last=true', 'maximum-likelihood')
    """
    if not given:
        return None
    names = [name for text in given for name in re.split(r"[\s;]+|,(?![a-z_]+=)", text) if name]
    if not names:
        raise ConfigError(
            "--estimators names none; as in --estimators 'disarm score-function:baseline=leave-one-out,samples=4'"
        )
    for name in names:
        build_estimator(name)
    return tuple(dict.fromkeys(names))
