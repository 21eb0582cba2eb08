"""The base that couplings leave the frequencies to, where features have different numbers of categories."""

import torch

from xorflow.data import Dataset, Split
from xorflow.training import Options, build_flow, init_from_data


def test_a_learned_base_of_unequal_categories_begins_finite() -> None:
    sizes = (2, 5, 3)
    values = torch.stack([torch.arange(30) % k for k in sizes], 1).to(torch.uint8)
    data = Dataset("rows", Split(values), None, None, sizes)
    flow = build_flow(Options(layers=2, conditioner="coupling:hidden=4"), data)
    init_from_data(flow, data.train)
    assert all(bool(weight.isfinite().all()) for weight in flow.parameters())
