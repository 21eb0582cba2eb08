"""Sampling: against one pass for each feature, against the samplers left aside, against zuko and the hardware's limit."""

from __future__ import annotations

import functools

import torch

import xorflow as xf
from limits import LIMIT, sampling_limit
from measures import Setup, measure
from models import new_flow, recipe_flow
from references import (
    D_PASSES,
    SAMPLERS,
    ZUKO,
    recomputed,
    sample_by,
    sequential_sample,
    zuko_flow,
    zuko_sampler,
)
from timing import Figure, alternate, faster_than, within
from xorflow.conditioners import Source
from xorflow.flows import SampleNoise

_TRIALS = 6
"""Calls after which sampling has tried every way, and chosen."""


def _noise(flow: xf.LatentFlow, batch: int) -> SampleNoise:
    return flow.draw_noise(batch, torch.Generator(flow.device).manual_seed(0))


def _sampling(flow: xf.LatentFlow, batch: int, rounds: int) -> tuple[float, float, str]:
    """Our seconds, those of the D-pass sampler on the same noise, and how far the samples agree."""
    noise = _noise(flow, batch)
    for _ in range(_TRIALS):
        flow.sample_with(noise)
    actions = {"ours": lambda: flow.sample_with(noise), "theirs": lambda: sequential_sample(flow, noise)}
    times = alternate(actions, flow.device, rounds=rounds, warm_up=1)
    different = int((flow.sample_with(noise) != sequential_sample(flow, noise)).sum())
    note = f"trained weights; {different} of {batch * flow.features:,} pixels differ from the reference's"
    return times["ours"], times["theirs"], note


def _against_samplers(prefix: str, flow: xf.LatentFlow, batches: tuple[int, ...], note: str) -> list[Figure]:
    """The sampler that is chosen against each that there is, on the same noise; 0.9 allows for noise of the clock."""
    figures = []
    for batch in batches:
        noise = _noise(flow, batch)
        actions = {name: functools.partial(sample_by, name, flow, noise) for name in SAMPLERS}
        actions["ours"] = functools.partial(flow.sample_with, noise)
        times = alternate(actions, flow.device, rounds=9, warm_up=_TRIALS)
        chosen = flow.sample_with(noise)
        for name, described in SAMPLERS.items():
            different = int((chosen != sample_by(name, flow, noise)).sum())
            told = f"{note}; {different} pixels differ"
            figure = faster_than(
                f"{prefix}-{batch}-{name}", times["ours"], described, times[name], at_least=0.9, note=told
            )
            figures.append(figure)
    return figures


def _against_limit(id: str, ours: float, batch: int, flow: xf.LatentFlow) -> Figure:
    limit = sampling_limit(flow.layers[0].conditioner, batch, flow.device)
    return faster_than(id, ours, LIMIT, limit.seconds, note=limit.rates)


def _against_zuko(id: str, ours: float, batch: int, device: torch.device) -> list[Figure]:
    flow = zuko_flow(784, 1024, device)
    if flow is None:
        return []
    spent = alternate({"zuko": zuko_sampler(flow, batch)}, device, rounds=3, warm_up=1)["zuko"]
    return [faster_than(id, ours, ZUKO, spent, note="a continuous flow, untrained")]


def _by_steps(id: str, recipe: str, batch: int, device: torch.device, *, at_most: float) -> Figure:
    """Samples by the steps of a recipe's networks, as many by each of its components, against whole passes."""
    flow = recipe_flow(recipe, device)
    parts = flow.latent_components() if isinstance(flow, xf.Mixture) else [flow]
    features = parts[0].features
    drawn = [(part, _noise(part, batch // len(parts))) for part in parts]
    made = [(part, noise, part.sample_with(noise)) for part, noise in drawn]

    def sample() -> None:
        for part, noise in drawn:
            part.sample_with(noise)

    @torch.inference_mode()
    def one_pass_each() -> None:
        for part, _, x in made:
            part.layers[0].conditioner({Source.STATE: x})

    times = alternate({"ours": sample, "pass": one_pass_each}, device, rounds=3, warm_up=0)
    different = sum(int((x != recomputed(part, noise, x)).sum()) for part, noise, x in made)
    note = (
        f"recipe {recipe}, untrained; the reference is one pass of {batch} rows times {features}; {different} of "
        f"{batch * features:,} pixels differ from those of a whole pass"
    )
    return within(id, times["ours"], D_PASSES, times["pass"] * features, at_most=at_most, note=note)


def _ids(prefix: str, *batches: int) -> list[str]:
    return [f"{prefix}-{batch}-{name}" for batch in batches for name in SAMPLERS]


_TRAINED, _SMALL = "trained weights", "64 units, trained weights"
_DEEP = "depth 4, untrained"


@measure(
    "cpu",
    "sampling-cpu-64",
    "sampling-cpu-64-limit",
    "sampling-cpu-64-zuko",
    "sampling-cpu-100",
    *_ids("sampling-cpu", 1, 64, 1024),
    *_ids("sampling-cpu-small", 1, 64, 1024),
    *_ids("sampling-cpu-depth-4", 1, 64),
    optional=("sampling-cpu-64-zuko",),
)
def sampling_cpu(setup: Setup) -> list[Figure]:
    """64 and 100 images against one pass for each feature, and against zuko; each sampler, for several networks."""
    flow, device = setup.flow, setup.device
    ours, theirs, note = _sampling(flow, 64, rounds=5)
    more, theirs_more, note_more = _sampling(flow, 100, rounds=3)
    return [
        faster_than("sampling-cpu-64", ours, D_PASSES, theirs, at_least=50, note=note),
        _against_limit("sampling-cpu-64-limit", ours, 64, flow),
        *_against_zuko("sampling-cpu-64-zuko", ours, 64, device),
        faster_than("sampling-cpu-100", more, D_PASSES, theirs_more, at_least=10, note=note_more),
        *_against_samplers("sampling-cpu", flow, (1, 64, 1024), _TRAINED),
        *_against_samplers("sampling-cpu-small", setup.small_flow, (1, 64, 1024), _SMALL),
        *_against_samplers("sampling-cpu-depth-4", new_flow(784, 4, device), (1, 64), _DEEP),
    ]


_RECIPES_CPU = ("recurrent-cpu", "recurrent", "transformer-pair", "transformer-four")


@measure("cpu", *(f"sampling-cpu-{recipe}-100" for recipe in _RECIPES_CPU))
def sampling_recipes_cpu(setup: Setup) -> list[Figure]:
    """100 images of networks that keep their state, or their keys and values, from feature to feature."""
    return [
        _by_steps(f"sampling-cpu-{recipe}-100", recipe, 100, setup.device, at_most=90)
        for recipe in _RECIPES_CPU
    ]


@measure(
    "cuda",
    "sampling-gpu-1024",
    "sampling-gpu-1024-limit",
    "sampling-gpu-1024-zuko",
    "sampling-gpu-10000",
    *_ids("sampling-gpu", 1, 64, 1024),
    *_ids("sampling-gpu-small", 1, 1024),
    *_ids("sampling-gpu-depth-4", 1024),
    optional=("sampling-gpu-1024-zuko",),
)
def sampling_gpu(setup: Setup) -> list[Figure]:
    """1,024 and 10,000 images against one pass for each feature, and against zuko where it is installed; each sampler."""
    flow, device = setup.flow, setup.device
    ours, theirs, note = _sampling(flow, 1024, rounds=5)
    many, theirs_many, note_many = _sampling(flow, 10_000, rounds=3)
    return [
        faster_than("sampling-gpu-1024", ours, D_PASSES, theirs, at_least=40, note=note),
        _against_limit("sampling-gpu-1024-limit", ours, 1024, flow),
        *_against_zuko("sampling-gpu-1024-zuko", ours, 1024, device),
        within("sampling-gpu-10000", many, D_PASSES, theirs_many, at_most=0.1, note=note_many),
        *_against_samplers("sampling-gpu", flow, (1, 64, 1024), _TRAINED),
        *_against_samplers("sampling-gpu-small", setup.small_flow, (1, 1024), _SMALL),
        *_against_samplers("sampling-gpu-depth-4", new_flow(784, 4, device), (1024,), _DEEP),
    ]
