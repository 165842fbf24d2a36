"""State in the host's memory: the same numbers to the bit, in an order that no lane can overtake."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Iterator
from typing import Any

import pytest
from cases import EVERY, Case

torch = pytest.importorskip("torch")

from simulated_lanes import Race, SimulatedLanes, simulated  # noqa: E402

import thalweg.torch  # noqa: E402
from thalweg import NonFiniteError, OptionError  # noqa: E402
from thalweg.kernels import staging  # noqa: E402
from thalweg.torch.offload.stream import Chunk, Slot, streamed  # noqa: E402

SHAPES = {"a": (64, 64), "b": (64, 64), "c": (70, 96), "d": (130,), "e": (64, 64), "f": ()}
#: What rules need so that they keep something for every one of these.
MORE: dict[str, dict[str, Any]] = {
    "SGD": dict(momentum=0.9),
    "Adafactor": dict(momentum=0.9),
    "Muon": dict(vectors="row"),
}
#: A little more than the moments of one (64, 64) in float32.
SMALL = 36_000


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedLanes]:
    """Those of a device whose chunks are small."""
    monkeypatch.setattr(staging, "STAGED", SMALL)
    with simulated() as found:
        yield found


# ---- the order of copies and steps


def passes(lanes: SimulatedLanes, slots: list[int], turns: list[list[int | None]], *, rehearsed: bool) -> None:
    """Steps over chunks of these slots; each adds one to every byte of its chunk."""
    rooms = [Slot(lanes) for _ in range(3)]
    chunks = [Chunk(10 + number, rooms[slot], number) for number, slot in enumerate(slots)]
    expected = [0] * len(chunks)
    for turn in turns:
        order = [None if number is None else chunks[number] for number in turn]

        def take(index: int, order: list = order) -> None:
            if order[index] is not None:
                lanes.step(order[index].room)
                order[index].room.add_(1)

        def look(index: int, order: list = order) -> None:
            if order[index] is not None:
                lanes.step(order[index].room)

        last: dict[Any, Any] = {}
        if rehearsed:
            streamed(order, look, None)
        streamed(order, take, lambda chunk, event, last=last: last.update({chunk.lanes: event}))
        for number in turn:
            if number is not None:
                expected[number] += 1
    for event in last.values():
        event.synchronize()
    for chunk, count in zip(chunks, expected, strict=True):
        lanes.look(chunk.host)
        assert chunk.host.tolist() == [count] * chunk.host.numel()


@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_overtaken(seed: int) -> None:
    """Chunks in any slots, of which any take part in a step."""
    draw = random.Random(seed)
    slots = [draw.randrange(3) if seed % 2 else number % 3 for number in range(7)]
    turns: list[list[int | None]] = [[None, *sorted(draw.sample(range(7), draw.randint(1, 7)))] for _ in range(4)]
    turns.append([None, *range(7)])
    passes(SimulatedLanes(), slots, turns, rehearsed=seed % 3 == 0)


@pytest.mark.parametrize("deaf", ["inward", "steps", "outward"])
def test_a_lane_that_does_not_wait_is_found_out(deaf: str) -> None:
    every: list[list[int | None]] = [list(range(7))] * 3
    with pytest.raises(Race, match=f"{deaf} may touch"):
        passes(SimulatedLanes((deaf,)), [number % 3 for number in range(7)], every, rehearsed=False)


def test_the_host_waits_before_it_looks() -> None:
    lanes = SimulatedLanes()
    chunk = Chunk(8, Slot(lanes), 0)
    streamed([chunk], lambda _: lanes.step(chunk.room), lambda *_: None)
    with pytest.raises(Race, match="host may touch"):
        lanes.look(chunk.host)


def test_the_next_chunks_are_on_their_way_before_one_is_stepped() -> None:
    """Else copies and steps would take turns, and the bus would be idle half of the time."""
    lanes, begun = SimulatedLanes(), []
    slots = [Slot(lanes) for _ in range(3)]
    chunks = [Chunk(8, slots[number % 3], number) for number in range(6)]
    streamed(chunks, lambda _: begun.append(sum(hasattr(chunk, "arrived") for chunk in chunks)), lambda *_: None)
    assert begun == [3, 4, 5, 6, 6, 6]


# ---- the same numbers


def problem(dtype: Any = None, seed: int = 0) -> list[tuple[str, Any]]:
    draw = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(shape, generator=draw).to(dtype or torch.float32) for name, shape in SHAPES.items()}
    return [(name, torch.nn.Parameter(x)) for name, x in made.items()]


def train(optimizer: Any, named: list[tuple[str, Any]], steps: range, *, without: str = "") -> None:
    for step in steps:
        for (name, p), (_, g) in zip(named, problem(seed=100 + step), strict=True):
            p.grad = None if name == without else g.detach().to(p.dtype)
        optimizer.step()


def snapshot(optimizer: Any, named: list[tuple[str, Any]]) -> dict[str, Any]:
    found = {name: p.detach() for name, p in named}
    found |= {f"{name}.{key}": e for name, p in named for key, e in optimizer.state[p].items()}
    return {name: x.clone() for name, x in found.items()}


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype, name
        assert torch.equal(ours[name], theirs[name]), name


def both(make: Any, dtype: Any = None) -> tuple[Any, list, Any, list]:
    """Two optimizers of the same parameters, the second with its state on the host."""
    plain, moved = problem(dtype), problem(dtype)
    return make(plain, False), plain, make(moved, True), moved


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
@pytest.mark.parametrize(
    ("dtype", "beside"),
    [
        ("float32", dict(engine="foreach", max_grad_norm=1.0)),
        ("bfloat16", dict(state_dtype="int8", rounding="compensated", on_nonfinite="skip")),
        ("float32", dict(on_nonfinite="raise")),
    ],
    ids=["lists", "lean", "raise"],
)
def test_every_rule_takes_the_same_steps(lanes: SimulatedLanes, case: Case, dtype: str, beside: dict) -> None:
    options = MORE.get(case.name, {})

    def make(named: list, offload_state: bool) -> Any:
        cls = getattr(thalweg.torch, case.name)
        return cls(named, case.lr, offload_state=offload_state, **options, **beside)

    plain, named, moved, others = both(make, getattr(torch, dtype))
    for optimizer, own in ((plain, named), (moved, others)):
        train(optimizer, own, range(3))
        train(optimizer, own, range(3, 4), without="b")
        train(optimizer, own, range(4, 6))
    assert_same(snapshot(moved, others), snapshot(plain, named))
    assert moved.stats().keys() == plain.stats().keys()
    homes = {e.untyped_storage().data_ptr() for s in moved.state.values() for e in s.values()}
    assert len(homes & moved._turns.chunks.keys()) == len(moved._turns.chunks) > 1
