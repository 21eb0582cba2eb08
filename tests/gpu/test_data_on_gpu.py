"""Data on a CUDA device: nothing waits for the host, and a gather can be captured."""

import pytest
import torch

from xorflow.data import Split, validate
from xorflow.errors import DataError

GOOD = [[0, 1, 2], [1, 0, 3]]
K = (2, 2, 4)


def grey(n: int, d: int) -> Split:
    return Split((torch.arange(n * d) * 11 % 256).reshape(n, d).to(torch.uint8), stochastic=True)


@pytest.mark.parametrize("categories", [(4, 4, 4), K])
def test_one_synchronisation_on_a_gpu_and_of_floats_two(
    categories: tuple[int, ...], synchronisations
) -> None:
    for dtype in (torch.uint8, torch.int64, torch.float32):
        x = torch.tensor(GOOD, device="cuda", dtype=dtype)
        assert synchronisations(lambda x=x: validate(x, categories)) == (2 if dtype.is_floating_point else 1)
        assert validate(x, categories).device == x.device
        with pytest.raises(DataError, match="row 0, feature 0"):
            validate(x + 5, categories)


def test_gather_on_a_gpu_never_waits_and_can_be_captured(synchronisations) -> None:
    split = grey(64, 16).to("cuda")
    rows, noise = torch.zeros(8, dtype=torch.int64, device="cuda"), torch.zeros(8, 16, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    assert synchronisations(lambda: split.gather(rows, noise)) == 0
    assert synchronisations(lambda: split.gather(rows, generator=generator)) == 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = split.gather(rows, noise).x
    new_rows, new_noise = torch.randint(64, (8,)), torch.rand(8, 16)
    rows.copy_(new_rows)
    noise.copy_(new_noise)
    graph.replay()
    assert torch.equal(out.cpu(), grey(64, 16).gather(new_rows, new_noise).x)
    assert torch.equal(split.frozen(0).values.cpu(), grey(64, 16).frozen(0).values)
    with pytest.raises(DataError, match=r"torch\.Generator\('cuda'\)"):
        split.batch(3, torch.Generator())
