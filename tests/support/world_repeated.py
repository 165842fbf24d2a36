"""Steps of DTensors that are like the one before: how often they were sorted all the same, and what came of it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

from tolerances import WORLD
from world_layouts import layout as laid_out
from world_steps import Run, in_one_process, odd_memory, stepped, unequal

import thalweg.torch.step.buckets as sorting


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


def engine_told(run: Run, layout: str) -> tuple[str, list[str]]:
    """Which engine stepped shards, and differences to one process."""
    got = stepped(run, odd_memory if layout == "odd memory" else laid_out(layout))
    return got.optimizer.engine, list(unequal(run, in_one_process(run), got, WORLD[run.dtype]))
