"""The figures of a finished run, each with one sentence that says what it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PAPER_NLL = 190.1
"""The best figure of Hesselink and Aziz (2020), in nats on binarised MNIST."""


@dataclass(frozen=True)
class Figure:
    """A negative log-likelihood in nats: what to call it, its text, and what it is."""

    name: str
    value: str
    meaning: str


def reported_part(result: dict[str, Any]) -> str | None:
    """The held-out part that a result is about: test data if there are any, otherwise validation data."""
    return next((part for part in ("test", "validation") if part in result), None)


def run_figures(result: dict[str, Any], part: str, paper_nll: float | None = None) -> list[Figure]:
    """The likelihoods of a `result.json`, beside what they are to be measured by.

    Args:
        result: the content of the file.
        part: `test` or `validation`.
        paper_nll: the best figure of the paper; it is shown for MNIST only.
    """
    likelihoods, data = result[part], result["data"]
    features = "pixels" if len(data.get("shape") or ()) == 2 else "features"
    figures = [
        Figure(
            "this flow, latent", _with_error(likelihoods["nll"], likelihoods["stderr"]), _latent(likelihoods)
        ),
        Figure(
            "this flow, deterministic",
            _with_error(likelihoods["refit_nll"], likelihoods.get("refit_stderr")),
            "The deterministic flow takes the most probable transformation every time; its likelihood is "
            "exact, on a base refitted to the training data.",
        ),
        Figure(
            f"independent {features}",
            f"{result['independent_nll']:.2f}",
            f"Independent {features} have the frequencies of the training data and ignore each other; this "
            "is exact, and what a flow must beat.",
        ),
    ]
    if data["name"] == "mnist" and paper_nll is not None:
        figures.append(
            Figure(
                "the paper's best",
                f"{paper_nll:.2f}",
                "The paper's best is the lowest in the NLL column of Hesselink and Aziz (2020); it is an upper "
                "bound from samples, for a flow on a fixed base.",
            )
        )
    return figures


def _latent(likelihoods: dict[str, Any]) -> str:
    opening = "The latent flow draws its transformation from a distribution; "
    if likelihoods["kind"] == "exact":
        return opening + "its likelihood is exact, with all of them summed out."
    return opening + f"this is an upper bound, on average, from {likelihoods['samples']:,} samples a row."


def _with_error(value: float, stderr: float | None) -> str:
    return f"{value:.2f}" if stderr is None else f"{value:.2f} ± {stderr:.2f}"
