"""Networks on integers: what one-hot states would give, what they see, and relaxed states in the corners are the integers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import one_hot

import zoo
from networks import networks
from slopes import allowed
from xorflow import MADE, MLP
from xorflow._states import Alphabet, Layout
from xorflow.conditioners import Conditioner, Source
from xorflow.conditioners.linear import Reader, Table, bag

ROWS = torch.tensor([[0, 2, 2], [1, 0, 3], [4, 4, 4], [3, 1, 0]])


def numbers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def by_product(rows: Tensor, table: Tensor) -> Tensor:
    """With one-hot rows."""
    return one_hot(rows, len(table)).sum(-2).to(table.dtype) @ table


@pytest.mark.parametrize("shape", [(4, 3), (2, 2, 3), (3,), (0, 3)])
def test_a_bag_is_the_product_with_one_hot_rows(shape):
    rows, table = ROWS.flatten()[: torch.Size(shape).numel()].reshape(shape), numbers(5, 6)
    found, expected = bag(rows, table), by_product(rows, table)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    slopes = [torch.autograd.grad(out.sin().sum(), table)[0] for out in (found, expected)]
    torch.testing.assert_close(*slopes, rtol=0, atol=1e-14)


def test_a_gradient_of_half_precision_weights_is_theirs():
    table = numbers(5, 6).detach().bfloat16().requires_grad_()
    found = torch.autograd.grad(bag(ROWS, table).sum(), table)[0]
    expected = torch.autograd.grad(by_product(ROWS, table).sum(), table)[0]
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected)


def test_second_derivatives_pass_through():
    table = numbers(5, 6)
    assert torch.autograd.gradcheck(lambda t: bag(ROWS, t), table)
    assert torch.autograd.gradgradcheck(lambda t: bag(ROWS, t).pow(3), table)


def test_several_rows_by_vmap():
    """As for the gradients of single examples, and for expectations over draws."""
    table = numbers(5, 6)
    rows = torch.stack([ROWS, ROWS.flip(0), (ROWS + 1) % 5])
    for dim in (0, 1):
        found = torch.vmap(lambda r: bag(r, table), (dim,))(rows.movedim(0, dim))
        expected = torch.stack([by_product(r, table) for r in rows])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
        slopes = [torch.autograd.grad(out.sin().sum(), table)[0] for out in (found, expected)]
        torch.testing.assert_close(*slopes, rtol=0, atol=1e-13)


def test_gradients_of_single_examples():
    table = numbers(5, 6).detach()
    each = torch.vmap(torch.func.grad(lambda t, row: bag(row, t).sin().sum()), (None, 0))(table, ROWS)
    expected = torch.stack(
        [torch.func.grad(lambda t, row=row: by_product(row, t).sin().sum())(table) for row in ROWS]
    )
    torch.testing.assert_close(each, expected, rtol=0, atol=1e-14)


def test_several_tables_by_vmap():
    tables = numbers(3, 5, 6)
    for rows, dim in ((ROWS, None), (torch.stack([ROWS, ROWS.flip(0), ROWS.flip(1)]), 0)):
        found = torch.vmap(bag, (dim, 0))(rows, tables)
        expected = torch.stack([by_product(rows if dim is None else rows[k], tables[k]) for k in range(3)])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
        slopes = [torch.autograd.grad(out.sin().sum(), tables)[0] for out in (found, expected)]
        torch.testing.assert_close(*slopes, rtol=0, atol=1e-13)


SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=5)


@given(SIZES, SIZES, st.integers(0, 2))
def test_a_reader_and_its_table_are_a_layer_of_one_hot_states(one, other, context):
    """The context, then bits as numbers, in the order of sources and features; every category in a row of its own."""
    alphabets = [Alphabet(one), Alphabet(other)]
    reader = Reader(alphabets, context)
    states = [
        torch.arange(6)[:, None] * torch.arange(1, a.features + 1) % torch.tensor(a.sizes) for a in alphabets
    ]
    given_context = numbers(6, context).detach() if context else None
    inputs = reader(states, given_context, torch.float64)
    values, bits = torch.cat(states, -1), torch.tensor(one + other) == 2
    assert inputs.dense.shape == (6, reader.dense)
    assert torch.equal(inputs.dense[:, context:], values[:, bits].double())
    if given_context is not None:
        assert torch.equal(inputs.dense[:, :context], given_context)
    assert (inputs.rows is None) == (reader.rows == 0)
    if inputs.rows is None:
        return
    owners = reader.alphabet.logit_features[int(bits.sum()) :].tolist()
    counts = one_hot(inputs.rows, reader.rows).sum(-2)
    seen: dict[int, int] = {}
    for row, d in enumerate(owners):
        category = seen[d] = seen.get(d, -1) + 1
        assert torch.equal(counts[:, row], (values[:, d] == category).long())
    table = Table(torch.ones(reader.rows, 3)).double()
    torch.nn.init.normal_(table.weight)
    torch.testing.assert_close(table(inputs.rows), counts.double() @ table.weight, rtol=0, atol=1e-14)


def test_a_network_reads_categories_at_a_cost_that_does_not_grow_with_them():
    """Weights beside the first and the last layer's: none for each pair of categories, and none for padding."""
    sizes = (1461, *[5] * 19)
    net = MADE(20, (512,), categories=sizes)
    total = sum(sizes)
    assert sum(p.numel() for p in net.parameters()) == 512 + 512 * total + 512 * total + total


@pytest.mark.parametrize("network", [MADE, MLP])
def test_fresh_layers_have_the_spread_of_all_that_they_read(network):
    """That of one linear layer of all bits and categories."""
    torch.manual_seed(0)
    sees = {"sees": ("state",)} if network is MLP else {}
    net = network(100, (4000,), categories=[2, *[3] * 99], **sees)
    first, table = net.net.layers[0], net.net.layers[0].table
    for weights in (first.weight, first.bias, table.weight):
        largest = float(weights.detach().abs().max())
        assert 0.99 * 298**-0.5 < largest <= 298**-0.5
    out = net({Source.STATE: torch.zeros(1, 100, dtype=torch.int64)})
    assert out.shape == (1, net.choices.flat)


# ---- what networks see, by changing it, and relaxed states in the corners ----


COUNT = 12


def given_to(net: Conditioner, seed: int = 0) -> tuple[dict[Source, Tensor], Tensor | None]:
    """Integers for each source, and a context."""
    generator = torch.Generator().manual_seed(seed)
    inputs = {}
    for source in net.sees:
        sizes = torch.tensor(net.alphabet(source).sizes)
        inputs[source] = torch.randint(60, (COUNT, net.features), generator=generator) % sizes
    context = torch.randn(COUNT, net.context_features, generator=generator, dtype=torch.float64)
    return inputs, context if net.context_features else None


def assert_corners(net: Conditioner) -> None:
    """Each source relaxed by itself, and all; in float64, to the rounding of sums in another order."""
    inputs, context = given_to(net)
    expected = net(inputs, context)
    assert expected.shape[-1] == net.choices.flat
    relaxed = {s: Layout(net.alphabet(s)).corners(x, torch.float64) for s, x in inputs.items()}
    for some in (*([source] for source in net.sees), list(net.sees)):
        mixed = inputs | {source: relaxed[source] for source in some}
        torch.testing.assert_close(net(mixed, context), expected, rtol=0, atol=1e-12)


def assert_legal(net: Conditioner) -> None:
    """A value is changed to every other: logits that must not see it stay what they are, to the last bit."""
    inputs, context = given_to(net)
    with torch.no_grad():
        before = net(inputs, context)
        for source, dependence in net.sees.items():
            seen = (
                net.mask.expand(net.features, -1) & ~net.mask[:, None]
                if net.mask is not None
                else allowed(net, dependence)
            )
            for e, size in enumerate(net.alphabet(source).sizes):
                hidden = ~seen[net.choices.logit_features, e]
                for step in range(1, size):
                    changed = inputs[source].clone()
                    changed[:, e] = (changed[:, e] + step) % size
                    after = net(inputs | {source: changed}, context)
                    assert torch.equal(after[:, hidden], before[:, hidden])


def networks_of(name: str) -> list[Conditioner]:
    return [
        n for layer in zoo.make(name).layers for n in (layer.conditioner, layer.posterior) if n is not None
    ]


@pytest.mark.parametrize("name", zoo.MEMBERS)
def test_corners_are_integers_in_the_zoo(name):
    for net in networks_of(name):
        assert_corners(net)


@given(networks())
def test_corners_are_integers(net):
    assert_corners(net)


@pytest.mark.parametrize("name", zoo.MEMBERS)
def test_integers_that_must_not_be_seen_change_nothing_in_the_zoo(name):
    for net in networks_of(name):
        assert_legal(net)


@given(networks())
def test_integers_that_must_not_be_seen_change_nothing(net):
    assert_legal(net)


@given(networks(), st.sampled_from([torch.uint8, torch.int16, torch.int32]))
def test_integers_of_any_type_are_the_same(net, dtype):
    inputs, context = given_to(net)
    found = net({source: x.to(dtype) for source, x in inputs.items()}, context)
    assert torch.equal(found, net(inputs, context))


@given(networks())
def test_integers_of_any_leading_shape(net):
    inputs, context = given_to(net)
    expected = net(inputs, context)
    shaped = {source: x.reshape(3, 4, -1) for source, x in inputs.items()}
    found = net(shaped, None if context is None else context.reshape(3, 4, -1))
    torch.testing.assert_close(found.reshape(expected.shape), expected, rtol=0, atol=1e-12)
