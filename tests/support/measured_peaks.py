"""Bytes that a step really needs beyond what was there before it."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np


def rate(rule: str) -> dict[str, float]:
    return {} if rule == "Adafactor" else {"lr": 1e-3}


def numpy_optimizer(
    rule: str, shapes: list[tuple[int, ...]], dtype: Any, engine: str, options: dict[str, Any]
) -> tuple[Any, Callable[[], None]]:
    """An optimizer of thalweg.numpy, and what takes a step with it."""
    import thalweg.numpy

    random = np.random.default_rng(0)
    params, grads = (
        {f"p{i}": np.asarray(random.standard_normal(shape), dtype) for i, shape in enumerate(shapes)} for _ in range(2)
    )
    optimizer = getattr(thalweg.numpy, rule)(engine=engine, **rate(rule), **options)
    return optimizer, lambda: optimizer.step(params, grads)


def traced_peak(step: Callable[[], None], *, warm_up: int) -> int:
    """By Python's own record of allocations, in which numpy enters its own."""
    tracemalloc.start()
    try:
        for _ in range(warm_up):
            step()
        gc.collect()
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        step()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def torch_optimizer(
    rule: str, shapes: list[tuple[int, ...]], dtype: str, engine: str, options: dict[str, Any], device: str = "cpu"
) -> tuple[Any, Callable[[], None]]:
    """An optimizer of thalweg.torch, and what takes a step with it."""
    import torch

    import thalweg.torch

    random = torch.Generator().manual_seed(0)
    named = []
    for i, shape in enumerate(shapes):
        p, g = (torch.empty(shape).normal_(generator=random).to(device, getattr(torch, dtype)) for _ in range(2))
        p.grad = g
        named.append((f"p{i}", p))
    optimizer = getattr(thalweg.torch, rule)(named, engine=engine, **rate(rule), **options)
    return optimizer, optimizer.step


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


def allocator_kept(optimizer: Any, step: Callable[[], None]) -> int:
    """What a step leaves behind beside state, in the blocks that CUDA's memory comes in. By the same record."""
    from torch._C._profiler import _EventType
    from torch.profiler import ProfilerActivity, profile

    def allocations(nodes: Any) -> Iterator[Any]:
        for node in nodes:
            if node.tag == _EventType.Allocation:
                yield node
            yield from allocations(node.children)

    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        step()
        gc.collect()
    results: Any = profiled.profiler
    tree = results.kineto_results.experimental_event_tree()
    blocks: dict[int, int] = {}
    for node in sorted(allocations(tree), key=lambda node: node.start_time_ns):
        _, event = node.typed
        if event.alloc_size > 0:
            blocks[event.ptr] = event.alloc_size
        else:
            blocks.pop(event.ptr, None)
    for state in optimizer.state.values():
        for entry in state.values():
            blocks.pop(entry.data_ptr(), None)
    return sum(-(-size // 512) * 512 for size in blocks.values())


def interpreted_peak(case: Any) -> int:
    """What a rank allocates in its third step, where kernels are interpreted. Every rank has to call it."""
    from interpreter import serving
    from sharded_costs import LAYOUTS, distribute, mesh_of, options_of

    import thalweg.torch

    with serving():
        named = distribute(case, mesh_of(*LAYOUTS[case.layout][0][2]))
        optimizer = getattr(thalweg.torch, case.optimizer)(named, **rate(case.optimizer), **options_of(case))
        return allocator_peak(optimizer.step, warm_up=2)


def interpreted_measure(case: Any) -> Any:
    """What ranks keep and send where kernels for GPUs are interpreted on CPUs. Every rank has to call it."""
    from interpreter import serving
    from sharded_costs import measure

    with serving():
        return measure(case)
