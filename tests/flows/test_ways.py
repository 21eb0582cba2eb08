"""Ways to invert a layer: the same integers, and the quickest is taken once all have been tried."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

import zoo
from enumeration import all_states, draw_noise, sequential_sample
from xorflow.flows import ways
from xorflow.flows.ways import Absent, Way


@pytest.mark.parametrize("way", list(Way))
@pytest.mark.parametrize("name", zoo.names())
def test_every_way_gives_the_same_samples(name, way):
    flow = zoo.make(name)
    noise, context = draw_noise(flow, 100, seed=3), zoo.rows_of_context(flow, 100)
    with torch.no_grad():
        expected = sequential_sample(flow, flow.base.sample(noise.base), noise.layers, context)
    with ways.only(way):
        assert torch.equal(flow.sample_with(noise, context), expected)


@pytest.mark.parametrize("way", list(Way))
@pytest.mark.parametrize("name", zoo.names())
def test_every_way_inverts_every_state(name, way):
    flow = zoo.make(name).greedy()
    x = all_states(flow.states.sizes)
    context = zoo.rows_of_context(flow, len(x))
    with ways.only(way):
        assert torch.equal(flow.to_data(flow.to_base(x, context), context), x)


@pytest.mark.parametrize("name", ["D3 depth 2 reversed", "K 2, 3, 4", "chain context", "coupling D2"])
def test_what_is_drawn_does_not_depend_on_what_has_been_tried(name):
    """Samples and the generator's state, from the first trial to long after the choice."""
    flow = zoo.make(name)
    context = zoo.context(flow)
    dist = flow(None if context is None else context[0])
    found = []
    for _ in range(8):
        generator = torch.Generator().manual_seed(4)
        found.append((dist.sample((40,), generator=generator), generator.get_state()))
    assert all(torch.equal(x, found[0][0]) and torch.equal(state, found[0][1]) for x, state in found)


@dataclass
class Race:
    """Ways that take given seconds, in steps of one second, on a clock of their own; inf: there is no such way."""

    seconds: dict[Way, float]
    now: float = 0.0
    calls: list[Way] = field(default_factory=list)

    def __post_init__(self):
        self.layer = zoo.make("D2").layers[0]

    def invert(self, way: Way, deadline: float) -> Tensor:
        self.calls.append(way)
        if math.isinf(self.seconds[way]):
            raise Absent
        for _ in range(int(self.seconds[way])):
            ways.check(deadline)
            self.now += 1
        return torch.tensor(self.seconds[way])

    def sample(self, rows: int = 64) -> list[Way]:
        """The ways that one call goes."""
        self.calls.clear()
        y = torch.zeros(rows, 2)
        ways.by_the_quickest(self.layer, y, "drawn", self.invert)
        return list(self.calls)


@pytest.fixture
def race(monkeypatch):
    def start(**seconds: float) -> Race:
        made = Race({way: seconds.get(way, math.inf) for way in Way})
        monkeypatch.setattr(ways, "clock", lambda: made.now)
        return made

    return start


L, B, P = Way.LAUNCH, Way.BLOCKS, Way.PASSES


@pytest.mark.parametrize("best", list(Way))
def test_the_quickest_is_taken_once_all_were_tried(race, best):
    made = race(**dict.fromkeys(Way, 9.0) | {best: 4.0})
    for _ in range(6):
        made.sample()
    assert made.sample() == [best]
    assert set(ways.chosen(made.layer).values()) == {best}


def test_trials_come_in_order_and_a_slower_way_is_given_up(race):
    made = race(launch=5, blocks=20, passes=100)
    assert [made.sample() for _ in range(3)] == [[L], [L], [B, P, L]]
    assert made.now == 5 * 3 + 6 * 2  # each was given up at the first look after five seconds
    assert [made.sample() for _ in range(3)] == [[L]] * 3


def test_ways_that_a_layer_does_not_have_cost_nothing(race):
    made = race(passes=7)
    assert [made.sample() for _ in range(4)] == [[L, B, P], [P], [P], [P]]
    assert made.now == 4 * 7


def test_the_choice_is_made_for_each_size_of_batch_and_each_layer(race):
    made = race(blocks=9, passes=4)
    for _ in range(5):
        made.sample(64)
    assert made.sample(64) == made.sample(127) == [P]
    assert made.sample(128) == [L, B]
    made.layer = zoo.make("D2").layers[0]
    assert made.sample(64) == [L, B]


def test_what_has_become_slow_is_chosen_anew(race):
    """Passes that settled quickly before training."""
    made = race(blocks=9, passes=4)
    for _ in range(5):
        made.sample()
    made.seconds[P] = 30  # slower than blocks, but a machine may be busy
    assert made.sample() == [P]
    made.seconds[P] = 500
    assert made.sample() == [P, B]
    assert [made.sample() for _ in range(3)] == [[B], [P, B], [B]]


@pytest.mark.parametrize("slow", [12, 500])
def test_that_is_so_at_any_time(race, slow):
    made = race(blocks=9, passes=4)
    for _ in range(20):
        made.sample()
    made.seconds[P], now = slow, made.now
    for _ in range(20):
        made.sample()
    assert made.sample() == [B]
    assert made.now - now < 20 * 20  # what was waited for in vain is a small part


def test_a_way_that_lost_by_accident_is_tried_again(race):
    made = race(blocks=20, passes=9)  # something else kept the machine busy
    assert [made.sample() for _ in range(7)][-3:] == [[P]] * 3
    made.seconds[B] = 3
    tried = [made.sample() for _ in range(6)]
    assert tried == [[P], [P], [B], [B], [B], [B]]


def test_threads_may_sample_at_once():
    flow = zoo.make("D3 depth 2 reversed")
    noise = draw_noise(flow, 50, seed=3)
    expected = flow.sample_with(noise)
    for _ in range(20):
        flow = zoo.make("D3 depth 2 reversed")  # nothing is known of its layers
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _, flow=flow: flow.sample_with(noise), range(24)))
        assert all(torch.equal(x, expected) for x in found)


def test_a_way_can_be_forced(race):
    made = race(blocks=9, passes=4)
    with ways.only("blocks"):
        assert [made.sample() for _ in range(5)] == [[B]] * 5
    with ways.only("launch"):
        assert made.sample() == [L, P]
    assert ways.chosen(made.layer) == {}
    with pytest.raises(ValueError), ways.only("magic"):
        pass
