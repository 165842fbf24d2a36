"""Bytes that a step of torch really allocates, by the record of torch's allocator."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any


def allocator_peak(step: Callable[[], None], *, warm_up: int) -> int:
    """By the record of torch's allocator, temporaries within its operations included."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(warm_up):
        step()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        step()
    results: Any = profiled.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
