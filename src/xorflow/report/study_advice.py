"""Which estimator to take: advice from the identities, each with what was measured and what training reached."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xorflow.report.study import rows_of_run, short
from xorflow.report.study_blocks import full_study
from xorflow.report.study_training import measured_variance, training_groups

Row = dict[str, Any]


def advice_block(results: Path) -> str:
    """For the top of the page on estimators: a list, with figures as far as there are any."""
    table = full_study(results) or {"rows": [], "training": []}
    return "\n".join(f"- {line}" for line in advice(table))


OBJECTIVE = (
    "**Choose the objective before the estimator.** Where the last layer can be summed out, `marginal` trains on the "
    "likelihood, or on a bound close to it."
)
ONE_LAYER = (
    "**Depth 1: draw nothing.** `marginal` has the exact gradient of the likelihood in one pass, `analytic` and "
    "`straight-through` that of the special-case bound. Whatever draws there adds noise to a gradient that is known."
)
SUMMING = (
    "**Depth 2 and more: sum the last layer out**, with `marginal` or `sum_last=true`: its gradient is then exact given what "
    "came before, and the signal of the layers before it loses the noise of the last."
)
REWARDS = "**Keep what a choice cannot change out of its signal.** That is the default; `rewards=all` shows what it saves."
SEVERAL = (
    "**Depth 2 and more: several samples or arms instead of a running mean.** `leave-one-out`, `disarm`, `arms` and "
    "`double-cv` need no running estimate, and suit every image by itself."
)
BIAS = (
    "**A bias may be the smaller evil** where variance is what hurts, but it does not average out. `straight-through` has no "
    "variance, and beyond depth 1 a bias; `reinmax` has one in all layers but the last; `st-gumbel` and `concrete`, everywhere."
)
POSTERIOR = "**With a posterior, keep the divergence in closed form**, which is the default, and a baseline."


def advice(table: Row) -> list[str]:
    """One piece of advice a line: what the identities say, then the figures."""
    figures = _Figures(table)
    pairs = (
        (OBJECTIVE, figures.of_objectives()),
        (ONE_LAYER, figures.of_one_layer()),
        (SUMMING, figures.of_summing()),
        (REWARDS, figures.of_rewards()),
        (SEVERAL, figures.of_several()),
        (BIAS, figures.of_bias()),
        (POSTERIOR, figures.of_posterior()),
    )
    return [f"{words} {found}".strip() for words, found in pairs]


class _Figures:
    """Sentences about the runs and measurements of a table; each is empty if a figure that it needs is not there."""

    def __init__(self, table: Row) -> None:
        self._table = table
        self._runs = {
            (run["depth"], run["estimator"]): run for run in table["training"] if not run.get("error")
        }
        self._groups = training_groups(table)

    def _nll(self, depth: int, *texts: str) -> list[str]:
        """Each estimator with its NLL; empty unless all have one."""
        runs = [self._runs.get((depth, text)) for text in texts]
        found = [f"`{run['estimator']}` {run['nll']:.1f}" for run in runs if run is not None]
        return found if len(found) == len(texts) else []

    def _variance(self, depth: int, text: str) -> float | None:
        run = self._runs.get((depth, text))
        return None if run is None else measured_variance(self._table, run)

    def of_objectives(self) -> str:
        sentences = []
        for depth in sorted({group.depth for group in self._groups}):
            own = [group for group in self._groups if group.depth == depth]
            sentences.append(f"depth {depth}: {', '.join(f'{g.short} {g.nlls[0]:.1f}' for g in own)}")
        return f"The best NLL that each objective reached, {'; '.join(sentences)}." if sentences else ""

    def of_one_layer(self) -> str:
        cells = self._nll(1, "marginal", "analytic")
        if not cells:
            return ""
        return f"After training: {', '.join(cells)}.{self._noisy_but_better()}"

    def _noisy_but_better(self) -> str:
        """Runs that draw, on the objective whose gradient `analytic` has exactly."""
        exact = self._runs[1, "analytic"]
        noisy = [
            run
            for group in self._groups
            if exact in group.runs
            for run in group.runs
            if (measured_variance(self._table, run) or 0.0) > 0
        ]
        better = [run for run in noisy if run["nll"] < exact["nll"]]  # the best first
        if not better:
            return ""
        return (
            f" But of {len(noisy)} runs on the special-case bound that draw, {len(better)} ended better than `analytic`, first "
            f"of all `{better[0]['estimator']}` with {better[0]['nll']:.1f}: that bound's own gradient stalls, and noise keeps "
            "it going."
        )

    def of_summing(self) -> str:
        """All pairs of an estimator with and without its last layer summed out, of the same objective."""
        pairs = [
            (self._runs[2, plain], self._runs[depth, text])
            for (depth, text) in self._runs
            if depth == 2 and "sum_last=true" in text and (2, plain := _plain(text)) in self._runs
            if not text.startswith("multi-sample")  # of another objective then
        ]
        if not pairs:
            return ""
        better = [summed["nll"] < plain["nll"] for plain, summed in pairs]
        cells = [
            f"`{plain['estimator']}` {plain['nll']:.1f} → {summed['nll']:.1f}" for plain, summed in pairs
        ]
        return (
            f"NLL at depth 2, without → with: {', '.join(cells)}; better in {sum(better)} of {len(better)}."
        )

    def of_rewards(self) -> str:
        texts, sentences = ("special-case", "special-case:rewards=all"), []
        for depth in (1, 2):
            cells = self._nll(depth, *texts)
            variances = [self._variance(depth, text) for text in texts]
            if cells and None not in variances:
                noise = " and ".join(map(short, variances))
                sentences.append(f"depth {depth}: variance at the start {noise}, NLL {', '.join(cells)}")
        return f"Measured, {'; '.join(sentences)}." if sentences else ""

    def of_several(self) -> str:
        texts = ("special-case", "leave-one-out:samples=4", "disarm", "arms:samples=4", "double-cv:samples=2")
        sentences = []
        for depth in (1, 2):
            cells = self._nll(depth, *texts)
            if cells:
                first, *others = (self._runs[depth, text]["nll"] for text in texts)
                better = sum(nll < first for nll in others)
                sentences.append(f"depth {depth}: {', '.join(cells)}, better in {better} of {len(others)}")
        if not sentences:
            return ""
        return (
            f"NLL after training, {'; '.join(sentences)}. Their variance is compared [below](#at-equal-time)."
        )

    def of_bias(self) -> str:
        """Of the special-case bound beyond depth 1: the best of the unbiased, and all that claim no such thing."""
        own = [g for g in self._groups if g.depth > 1 and g.objective == "special-case bound"]
        runs = [run for group in own for run in group.runs]
        biased = [run for run in runs if self._is_biased(run)]
        fair = [run for run in runs if not self._is_biased(run)]
        if not (biased and fair):
            return ""
        below = [run for run in biased if run["nll"] < fair[0]["nll"]]
        words = (
            f"{len(below)} of {len(biased)} biased ones ended better"
            if below
            else "no biased one ended better"
        )
        return (
            f"NLL at depth {runs[0]['depth']}, of the special-case bound: the best unbiased one `{fair[0]['estimator']}` "
            f"{fair[0]['nll']:.1f}; biased {_listed(biased)}: {words}."
        )

    def _is_biased(self, run: Row) -> bool:
        return any(row["claim"] == "biased" for row in rows_of_run(self._table, run, small=True))

    def of_posterior(self) -> str:
        options = ("baseline=none", "baseline=greedy", "kl=suffix", "kl=vanilla", "kl=printed")
        of = ("", ":sum_last=true", *(f":{option}" for option in options))
        sentences = [
            f"depth {depth}: {', '.join(cells)}"
            for depth in (1, 2)
            if (cells := self._nll(depth, *(f"full-posterior{options}" for options in of)))
        ]
        return f"NLL after training, {'; '.join(sentences)}.{self._best_evidence()}" if sentences else ""

    def _best_evidence(self) -> str:
        """The best run of the evidence bound at depth 2."""
        own = [g for g in self._groups if g.depth == 2 and g.objective == "evidence lower bound"]
        if not own:
            return ""
        best = own[0].runs[0]
        words = ", which is biased" if self._is_biased(best) else ""
        return (
            f" The best of all runs of the ELBO at depth 2: `{best['estimator']}` {best['nll']:.1f}{words}."
        )


def _listed(runs: Sequence[Row]) -> str:
    return ", ".join(f"`{run['estimator']}` {run['nll']:.1f}" for run in runs)


def _plain(text: str) -> str:
    """The estimator without its last layer summed out.

    >>> _plain("disarm:sum_last=true"), _plain("arms:samples=4,sum_last=true")
    ('disarm', 'arms:samples=4')
    """
    name, _, options = text.partition(":")
    kept = [option for option in options.split(",") if option != "sum_last=true"]
    return f"{name}:{','.join(kept)}" if kept else name
