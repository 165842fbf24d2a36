"""Steps of DTensors that are like the one before: how often they were sorted all the same, and what came of it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
from tolerances import WORLD
from world_layouts import layout as laid_out
from world_layouts import torch
from world_steps import Run, in_one_process, odd_memory, stepped, unequal

import thalweg.torch.step.buckets as sorting
from thalweg.torch.sharding.shards import local


def times_sorted(run: Run, layout: str, exchange_after: int | None = None) -> tuple[list[int], list[str]]:
    """In which steps parameters were sorted, and differences to one process.

    exchange_after: a step after which the shards of all parameters are moved to other memory, as FSDP2 does.
    """
    seen: list[int] = []
    whole = sorting.Sorter.sort
    now = [0]

    def sort(self: Any, optimizer: Any, *given: Any, **named: Any) -> Any:
        seen.append(now[0])
        if exchange_after is not None and now[0] == exchange_after:
            exchanged.append(optimizer)
        return whole(self, optimizer, *given, **named)

    exchanged: list[Any] = []

    @contextmanager
    def watch(step: int) -> Any:
        now[0] = step
        yield
        if step == exchange_after:
            for group in exchanged[0].param_groups:
                for p in group["params"]:
                    p._local_tensor = p._local_tensor.clone()

    sorting.Sorter.sort = sort  # type: ignore[method-assign]
    try:
        got = stepped(run, laid_out(layout), watch)
    finally:
        sorting.Sorter.sort = whole  # type: ignore[method-assign]
    return seen, list(unequal(run, in_one_process(run), got, WORLD[run.dtype]))


def replayed(run: Run, layout: str) -> tuple[int, list[str]]:
    """How many graphs a step was recorded in, and what differs from launches, bit by bit."""
    outcomes = []
    for replays in "01":
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("THALWEG_REPLAY", replays)
            outcomes.append(stepped(run, laid_out(layout)))
    launched, got = outcomes
    pairs = {name: (local(p), local(got.params[name])) for name, p in launched.params.items()}
    for name, state in launched.states.items():
        pairs |= {f"{name}.{key}": (local(x), local(got.states[name][key])) for key, x in state.items()}
    runs = [own for step in got.optimizer._steps.values() for own, _ in step.runs.runs]
    graphs = [len(each.graphs) for own in runs for each in own.replay.known.values() if not isinstance(each, int)]
    told, others = (outcome.optimizer.stats() for outcome in outcomes)
    differing = [name for name, (one, other) in pairs.items() if not torch.equal(one, other)]
    return max(graphs, default=0), [*differing, *(f"stats of {name}" for name in told if told[name] != others[name])]


def engine_told(run: Run, layout: str) -> tuple[str, list[str]]:
    """Which engine stepped shards, and differences to one process."""
    got = stepped(run, odd_memory if layout == "odd memory" else laid_out(layout))
    return got.optimizer.engine, list(unequal(run, in_one_process(run), got, WORLD[run.dtype]))
