"""Score functions: an objective, a rule of credit and a baseline."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from xorflow.errors import ConfigError, ModelError
from xorflow.estimators.base import Bias, Estimator, Loss, Part, Target
from xorflow.estimators.baselines import Baseline, BaselineInputs, RunningMean, Standardiser
from xorflow.estimators.credit import Credit, Descendants, feature_sums, weighted_score
from xorflow.estimators.layerwise import LayerwiseEstimator
from xorflow.estimators.objectives import Bound, Objective, Sampled
from xorflow.flows import LatentFlow, Point
from xorflow.flows.choices import Draws


class ScoreFunction(LayerwiseEstimator):
    r"""The score function of an objective that is an expectation over choices: REINFORCE, in three factors.

    .. math:: S = \sum_T T + \sum_{l,d} \mathrm{sg}[A_{l,d} - b_{l,d}] \log p(u^{(l)}_d \mid \cdot), \qquad
              A_{l,d} = \sum_{T, e} W^T_{l,d,e}\, T_e

    with T the terms of the `objective`, W the weights that `credit` gives them, and b what the `baseline` expects of them. Of
    the `ELBO` q is in the place of p, and the first sum has the generator's gradient. A learned base gets the gradient of the
    rewards.

    | in the paper | here |
    |---|---|
    | special case, SFE | `ScoreFunction(Bound())` |
    | SFE of the evidence lower bound | `ScoreFunction(ELBO())` |
    | RLOO (not in the paper) | `ScoreFunction(baseline=LeaveOneOut(4))` |

    Unbiased with the credits `Descendants` and `All`, and with any baseline; biased with others, where a choice changes a term
    that they leave out or count twice: `bias` says which. Standardisation by one number rescales the gradient; by feature it is
    biased.

    Cost: L passes, 2 L of the `ELBO`, more in layers that see their own u, where drawing takes several; a critic doubles them,
    and so does a credit of two samples; with K samples K times as many, the first layer's only once. Williams (1992);
    Hesselink and Aziz (2020), section 5.

    Args:
        objective: `Bound` or `ELBO`; the first by default.
        credit: which terms weigh which score: `Descendants` by default.
        baseline: what to expect of them: a `RunningMean` by default.
        standardise: what to divide them by: `OneScale`, `FeatureScale`, or nothing.
        sum_last: take the expectation over the last layer's choices instead of drawing them: less variance, unbiased too, and
            at depth 1 the exact gradient.

    >>> import torch, xorflow as xf
    >>> _ = torch.manual_seed(0)
    >>> flow = xf.LatentFlow([xf.Layer(xf.MADE(4, hidden=(8,)))], xf.FactorisedBase(4))
    >>> estimator = ScoreFunction(Bound(entropy=0.1), baseline=xf.estimators.GreedyCritic())
    >>> estimator(flow, torch.tensor([[0, 1, 1, 0]])).surrogate.backward()
    >>> estimator.bias(flow) is None
    True
    """

    def __init__(
        self,
        objective: Objective | None = None,
        credit: Credit | None = None,
        baseline: Baseline | None = None,
        standardise: Standardiser | None = None,
        sum_last: bool = False,
    ) -> None:
        super().__init__(sum_last)
        self.objective = objective or Bound()
        self.credit = credit or Descendants()
        self.baseline = baseline or RunningMean()
        self.standardise = standardise
        self.proposal = self.objective.proposal
        if sum_last and self.credit.samples > 1:
            raise ConfigError("sum_last leaves no second term for two_samples in the last layer; choose one")
        if self.credit.of_divergence and not self.objective.has_divergence:
            raise ConfigError(
                f"{type(self.credit).__name__} is about the terms of a divergence, and {type(self.objective).__name__} has "
                "none; choose another credit, or objective=elbo"
            )
        self._samples = self.credit.samples * self.baseline.samples
        self.uniforms = self._samples + self.baseline.draws_another
        self._shape: tuple[int, int] | None = None

    def target(self, flow: LatentFlow) -> Target:
        return self.objective.target(flow)

    def check(self, flow: LatentFlow) -> None:
        super().check(flow)
        self.credit.check(flow)

    # ---- what weighs which score ----

    def prepare(self, flow: LatentFlow, total_steps: int | None = None) -> None:
        super().prepare(flow, total_steps)
        self.objective.prepare(flow, total_steps)

    def make_for(self, flow: LatentFlow) -> None:
        weights = self._weights(flow)
        self.sums = nn.ModuleList(
            nn.ModuleList(feature_sums([of_term[sample] for _, of_term in layer]) for layer in weights)
            for sample in range(self.credit.samples)
        )
        shape = (len(self.objective.terms(flow, self.drawn_layers(flow))), flow.features)
        if self._shape != shape:
            self._shape = shape
            for part in (self.baseline, self.standardise):
                if part is not None:
                    part.prepare(*shape, flow.base.logits)

    def _weights(self, flow: LatentFlow) -> list[list[tuple[Tensor, Tensor]]]:
        """For each layer that is drawn and each term: what depends on its choices, (D, D), and what is counted, (S', D, D)."""
        drawn, shape = self.drawn_layers(flow), (self.credit.samples, flow.features, flow.features)
        terms = self.objective.terms(flow, drawn)
        return [
            [(term.depends[layer], self.credit.weights(term, layer, flow).reshape(shape)) for term in terms]
            for layer in range(drawn)
        ]

    def bias_of(self, flow: LatentFlow, part: Part) -> Bias | None:
        layer, scale = part.layer or 0, self.standardise
        if self._has_scores(flow, part):
            if scale is not None and not scale.keeps_direction:
                return Bias(
                    f"{type(scale).__name__} divides the terms at each feature by a number of its own"
                )
            of_layer = self._weights(flow)[layer - 1]
            if not all(bool((weights.sum(0) == 1)[depends].all()) for depends, weights in of_layer):
                credit = type(self.credit).__name__
                return Bias(
                    f"{credit} does not weigh the scores of layer {layer} with all that its choices change, once each"
                )
        if scale is not None and scale.keeps_direction:
            return Bias(f"{type(scale).__name__} divides the gradient by one number", rescaled=True)
        return None

    def _has_scores(self, flow: LatentFlow, part: Part) -> bool:
        """Whether some of a part's gradient comes by scores; the rest needs none, and has no bias."""
        if part.layer is None or part.layer > self.drawn_layers(flow):
            return False
        drawing = "generator" if self.proposal == "p" else "posterior"
        return part.role == drawing or (self.proposal == "q" and flow.layers[part.layer - 1].relative)

    # ---- the gradient ----

    def loss(self, flow: LatentFlow, start: Point, draws: Tensor | None) -> Loss:
        drawn = self.drawn_layers(flow)

        def objective_of(chosen: Draws | None) -> Sampled:
            return self.objective(flow, start, chosen, drawn)

        @torch.no_grad()
        def signal_of(chosen: Draws) -> Tensor:
            return objective_of(chosen).signal

        another = draws[-1:] if draws is not None and self.baseline.draws_another else None
        groups = [None] if draws is None else draws[: self._samples].split(self.baseline.samples)
        scores, samples = [], []
        for chosen, sums in zip(groups, self.sums, strict=True):
            sampled = objective_of(chosen)
            inputs = BaselineInputs(flow, start, sampled.signal, signal_of, another)
            weights, deviation, stats = self.centred(inputs)
            if deviation is not None:
                weights = weights / deviation
            scores.append(weighted_score(sums, weights, sampled.log_prob))
            samples.append((sampled, deviation, stats))
        sampled, deviation, stats = samples[0]  # of further samples the scores alone count
        direct = sampled.direct
        if self.standardise is not None and self.standardise.keeps_direction:
            direct = direct / deviation  # one number for the whole objective
        return Loss.of(sum(scores, start=direct), sampled.bound, stats=stats)

    def centred(self, inputs: BaselineInputs) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        """The signal less its baseline, what to divide by, and the statistics to update from; nothing carries a gradient."""
        signal = inputs.signal
        rest = signal - self.baseline.expected(inputs)
        lead = tuple(range(signal.dim() - 2))
        stats = {
            "signal": signal.mean(lead),
            "rest": rest.mean(lead),
            "rest_square": rest.square().mean(lead),
        }
        if self.standardise is None:
            return rest, None, stats
        return *self.standardise(rest), stats

    def update(self, stats: Mapping[str, Tensor]) -> None:
        self.baseline.update(stats["signal"])
        if self.standardise is not None:
            self.standardise.update(stats["rest"], stats["rest_square"])
        self.objective.update()


class Analytic(Estimator):
    r"""The exact gradient, at depth 1, of the special-case bound or of the evidence lower bound.

    .. math:: L = \sum_d \sum_{u_d} p(u_d \mid x)\, \log p_d(x_d \ominus u_d), \qquad
              \mathrm{ELBO} = \sum_d \sum_{u_d} q(u_d \mid x)\, \log p_d(x_d \ominus u_d) - \mathrm{KL}(q_d \| p_d)

    Exact: unbiased without variance, for networks and base alike. It is what `ScoreFunction` and the other estimators that
    draw are measured against. With more layers the choices of all but the last would have to be enumerated; there
    `sum_last=True` of the others takes the last layer's expectation in the same way.

    Cost: 1 pass, and one of the posterior for the evidence lower bound. Hesselink and Aziz (2020), section 4; the sums are
    ours.

    Args:
        objective: `Bound` or `ELBO`; the first by default.

    >>> import torch, xorflow as xf
    >>> _ = torch.manual_seed(0)
    >>> flow = xf.LatentFlow([xf.Layer(xf.MADE(4, hidden=(8,)))], xf.FactorisedBase(4))
    >>> x = torch.tensor([[0, 1, 1, 0]])
    >>> bool(Analytic()(flow, x).bound < flow().log_prob(x))
    True
    """

    def __init__(self, objective: Objective | None = None) -> None:
        super().__init__()
        self.objective = objective or Bound()
        self.proposal = self.objective.proposal

    def target(self, flow: LatentFlow) -> Target:
        return self.objective.target(flow)

    def check(self, flow: LatentFlow) -> None:
        super().check(flow)
        if flow.depth != 1:
            raise ModelError(
                f"the analytic gradient sums every choice out, which needs one layer; with {flow.depth} layers the sum over "
                "the earlier ones has no closed form: use score-function:sum_last=true or maximum-likelihood"
            )
        if not flow.last_layer_summable:
            raise ModelError(
                "the analytic gradient sums every choice out, and this layer sees its own u: its choices are not independent; "
                "use a score function"
            )

    def prepare(self, flow: LatentFlow, total_steps: int | None = None) -> None:
        self.objective.prepare(flow, total_steps)

    def loss(self, flow: LatentFlow, start: Point, draws: Tensor | None) -> Loss:
        del draws
        sampled = self.objective(flow, start, None, 0)
        return Loss.of(sampled.direct, sampled.bound)

    def update(self, stats: Mapping[str, Tensor]) -> None:
        del stats
        self.objective.update()
