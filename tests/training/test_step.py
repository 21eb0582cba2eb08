"""One step: learning rates, optimisers, where weight decay reaches, clipping."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from tiny_runs import tiny_dataset, tiny_flow
from xorflow.bases import FactorisedBase
from xorflow.conditioners import CausalTransformer, Recurrent
from xorflow.estimators import MaximumLikelihood
from xorflow.flows import LatentFlow, Layer
from xorflow.training import Options, Trainer
from xorflow.training.optimiser import Muon, hidden_matrices, learning_rate, make_optimiser, orthogonal

CPU = torch.device("cpu")


def test_cosine_falls_from_the_highest_rate_to_almost_zero() -> None:
    rates = [learning_rate(Options(lr=2.0), step, 100) for step in range(100)]
    assert rates[0] == 2.0
    assert rates == sorted(rates, reverse=True)
    assert rates[50] == pytest.approx(1.0)
    assert 0 < rates[99] < 1e-3
    assert learning_rate(Options(lr=2.0), 100, 100) == pytest.approx(0.0)


def test_constant_stays() -> None:
    options = Options(lr=0.5, schedule="constant")
    assert {learning_rate(options, step, 10) for step in range(10)} == {0.5}


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_warm_up_rises_evenly_and_ends_at_the_highest_rate(schedule: str) -> None:
    options = Options(lr=1.0, warmup=4, schedule=schedule)
    rates = [learning_rate(options, step, 20) for step in range(5)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_a_run_that_is_shorter_than_its_warm_up_only_rises() -> None:
    assert learning_rate(Options(lr=1.0, warmup=10), 4, 5) == pytest.approx(5 / 11)


@pytest.mark.parametrize(
    ("name", "kind"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)]
)
def test_names_of_optimisers(name: str, kind: type[torch.optim.Optimizer]) -> None:
    optimiser = make_optimiser(tiny_flow(), Options(optimiser=name), CPU)
    assert type(optimiser) is kind


# ---- Muon ----


def small_transformer(**options: Any) -> LatentFlow:
    torch.manual_seed(0)
    net = CausalTransformer(6, width=8, depth=2, heads=2, dropout=0.0, categories=3, context=3, **options)
    return LatentFlow([Layer(net)], FactorisedBase(6, categories=3, learned=True))


def test_muon_is_for_the_matrices_within_networks() -> None:
    flow = small_transformer()
    optimiser = make_optimiser(
        flow, Options(optimiser="muon", conditioner="recurrent", weight_decay=0.1), CPU
    )
    assert type(optimiser) is Muon
    every = [id(p) for g in optimiser.param_groups for p in g["params"]]
    assert len(every) == len(set(every)) == len(list(flow.parameters()))
    names = {id(p): name for name, p in flow.named_parameters()}
    turned = {names[id(p)]: g["parts"] for g in optimiser.param_groups if g["parts"] for p in g["params"]}
    assert len(turned) == 2 * 4
    assert all("blocks" in name and name.endswith("weight") for name in turned)
    assert {parts for name, parts in turned.items() if "queries" in name} == {3}
    for cell, gates in (("gru", 3), ("lstm", 4)):
        cells = [
            layer
            for layer in Recurrent(6, width=8, depth=2, cell=cell).modules()
            if isinstance(layer, nn.RNNBase)
        ]
        assert [len(found) for found in hidden_matrices(nn.ModuleList(cells)).values()] == [4]
        assert list(hidden_matrices(nn.ModuleList(cells))) == [gates]
    plain = make_optimiser(tiny_flow(), Options(optimiser="muon", conditioner="recurrent"), CPU)
    assert not any(g["parts"] for g in plain.param_groups)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has had its own Muon since 2.9")
def test_muon_moves_matrices_by_orthogonal_ones_and_the_rest_as_adamw() -> None:
    """Against torch's own Muon, and against AdamW, over some steps of the same gradients."""
    ours, theirs = small_transformer(), small_transformer()
    options = Options(optimiser="muon", conditioner="transformer", weight_decay=0.1, lr=0.01)
    optimiser = make_optimiser(ours, options, CPU)
    named = dict(theirs.named_parameters())
    stacked = [name for name in named if "queries.weight" in name]  # which torch's would take as one matrix
    single = [name for name in named if "blocks" in name and named[name].dim() == 2 and name not in stacked]
    others = [name for name in named if name not in (*stacked, *single)]
    # ten times the rate, and the same product of rate and decay
    muon = torch.optim.Muon([named[name] for name in single], lr=0.1, weight_decay=0.01)
    adam = torch.optim.AdamW([named[name] for name in others], lr=0.01, weight_decay=0.0)
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        for each in (optimiser, muon, adam):
            each.step()
    difference = {name: (p - named[name]).detach().abs().max().item() for name, p in ours.named_parameters()}
    decayed = [name for name in others if name.endswith("head.weight")]  # ours decays it, as every matrix
    assert max(difference[name] for name in others if name not in decayed) < 1e-6
    # theirs is rounded to bfloat16; they moved by about 0.1
    assert max(difference[name] for name in single) < 0.01
    assert min(difference[name] for name in stacked) > 0.1


def test_other_cells_are_left_to_adam() -> None:
    cells = nn.ModuleList([nn.RNN(4, 4), nn.LSTM(4, 4, proj_size=2)])
    assert [tuple(p.shape) for p in hidden_matrices(cells)[4]] == [(16, 4), (16, 2)]


def test_small_singular_values_grow() -> None:
    """As the docstring has it: by about 3.4445^5."""
    scales = torch.tensor([1.0, 0.5, 0.1, 0.01, 1e-4], dtype=torch.float64)
    found = orthogonal(torch.diag(scales).unsqueeze(0))[0].diagonal()
    assert bool(((found[:4] > 0.6) & (found[:4] < 1.3)).all())
    assert float(found[4]) == pytest.approx(485e-4 / float(scales.norm()), rel=0.02)


def test_orthogonal_matrices_have_singular_values_near_one() -> None:
    torch.manual_seed(0)
    for shape in ((3, 5, 5), (2, 8, 3), (4, 3, 8)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
        assert float(values.min()) > 0.6
        assert float(values.max()) < 1.3
    assert float(orthogonal(torch.zeros(1, 4, 4)).abs().max()) == 0.0


def test_weight_decay_reaches_matrices_only_and_each_parameter_once() -> None:
    flow = tiny_flow(context=3)
    optimiser = make_optimiser(flow, Options(weight_decay=0.1), CPU)
    decayed = {id(p) for g in optimiser.param_groups if g["weight_decay"] for p in g["params"]}
    every = [id(p) for g in optimiser.param_groups for p in g["params"]]
    assert len(every) == len(set(every)) == len(list(flow.parameters()))
    for name, parameter in flow.named_parameters():
        assert (id(parameter) in decayed) == (parameter.dim() == 2 and not name.startswith("base")), name


def test_a_fixed_base_is_not_optimised() -> None:
    flow = tiny_flow()
    flow.base.logits.requires_grad_(False)
    optimiser = make_optimiser(flow, Options(), CPU)
    assert all(p is not flow.base.logits for g in optimiser.param_groups for p in g["params"])


def _change(flow: LatentFlow, **options: Any) -> float:
    """How far one epoch of one step moves all weights together."""
    before = [p.detach().clone() for p in flow.parameters()]
    chosen = Options(epochs=1, batch_size=140, device="cpu", schedule="constant", optimiser="sgd", **options)
    Trainer(flow, MaximumLikelihood(), tiny_dataset(validation=False), chosen).train()
    pairs = zip(flow.parameters(), before, strict=True)
    return math.sqrt(sum(float((p.detach() - q).square().sum()) for p, q in pairs))


def test_clipping_bounds_the_norm_of_the_gradient() -> None:
    free = _change(tiny_flow(), lr=1.0)
    assert free > 0.011
    assert _change(tiny_flow(), lr=1.0, clip=0.01) == pytest.approx(0.01, rel=1e-3)
    assert _change(tiny_flow(), lr=1.0, clip=100 * free) == pytest.approx(free, rel=1e-6)


def test_the_schedule_reaches_the_optimiser() -> None:
    """Warm-up makes the first step's rate lr / (warmup + 1)."""
    assert _change(tiny_flow(), lr=1.0, warmup=9) == pytest.approx(
        0.1 * _change(tiny_flow(), lr=1.0), rel=1e-4
    )
