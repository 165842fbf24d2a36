"""State in the host's memory: chunks pass the device in an order that no lane can overtake."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from simulated_lanes import Race, SimulatedLanes  # noqa: E402

from thalweg.torch.offload.stream import Chunk, Slot, streamed  # noqa: E402


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


@pytest.mark.parametrize("seed", range(6))
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
