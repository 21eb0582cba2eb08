"""Decoding and gathering as captured launches, on a stand-in for CUDA graphs."""

import pytest
import torch

import zoo
from standin import Graph, graph
from xorflow._cuda import decoding
from xorflow.conditioners import CausalTransformer
from xorflow.data import Split
from xorflow.flows.layer import by_passes

pytestmark = pytest.mark.usefixtures("stand_in")


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("skipped", [(), (1, 5, 6)])
@pytest.mark.parametrize("context", [0, 2])
@torch.no_grad()
def test_captured_steps_give_the_samples_of_whole_passes(
    rotary: bool, skipped: tuple[int, ...], context: int
) -> None:
    torch.manual_seed(0)
    net = CausalTransformer(
        12,
        width=8,
        depth=2,
        heads=2,
        dropout=0.0,
        shape=(3, 4),
        rotary=rotary,
        skipped=skipped,
        context=context,
    )
    for parameter in net.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    flow = zoo.flow(zoo.Layer(net)).double().eval()
    noise = flow.draw_noise(6, torch.Generator().manual_seed(0))
    seen = torch.rand(6, context, dtype=torch.float64) if context else None
    expected = by_passes(flow.layers[0], flow.base.sample(noise.base), noise.layers[:, 0], seen)
    for _ in range(2):  # a second decoder captures anew
        decoder = net.incremental(6, seen, 56)
        assert decoder is not None
        order = torch.tensor(net.order)
        y = flow.base.sample(noise.base).index_select(1, order)
        found = decoder.decode(y, noise.layers[:, 0].index_select(1, order))
        assert found is not None
        assert torch.equal(found, expected.index_select(1, order))
    assert Graph.replays == 2 * 12


def test_decoding_that_cannot_be_captured_is_done_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: object) -> None:
        raise RuntimeError("no capture")

    monkeypatch.setattr(decoding.GraphDecoder, "run", never)
    torch.manual_seed(0)
    net = CausalTransformer(12, width=8, depth=1, heads=2, dropout=0.0, shape=(3, 4))
    flow = zoo.flow(zoo.Layer(net)).double().eval()
    noise = flow.draw_noise(6, torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = by_passes(flow.layers[0], flow.base.sample(noise.base), noise.layers[:, 0], None)
    assert torch.equal(flow.sample_with(noise), expected.long())


def test_a_gather_can_be_captured() -> None:
    grey = (torch.arange(64 * 16) * 11 % 256).reshape(64, 16).to(torch.uint8)
    split = Split(grey, stochastic=True)
    rows, noise = torch.zeros(8, dtype=torch.int64), torch.zeros(8, 16)
    recorded = Graph()
    with graph(recorded):
        out = split.gather(rows, noise).x
    rows.copy_(torch.randint(64, (8,)))
    noise.copy_(torch.rand(8, 16))
    recorded.replay()
    assert torch.equal(out, split.gather(rows, noise).x)
