"""How much memory a step needs beyond parameters, gradients and state, at its peak.

The rules themselves are run on arrays without numbers, in the order and with the lifetimes that the engines of the
front ends give theirs: what is said here of engines follows ``torch/engines.py``, ``torch/optimizer.py``,
``numpy/stepping.py`` and ``numpy/batches.py``. State is there already: these are the peaks of a step after the first.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from thalweg.boundary import Advance, advance, arithmetic, first_state, slice_of
from thalweg.kernels.chunks import CHUNK, SMALL, STACK, extent, pieces
from thalweg.kernels.cpu.library import reason_missing
from thalweg.kernels.cpu.plan import reason_unserved
from thalweg.plan import gpus, native
from thalweg.plan.items import Item, state_entries
from thalweg.plan.native import LR
from thalweg.spaces import shape_lists, shapes
from thalweg.spaces.shape_arrays import Ledger, ShapeOnly
from thalweg.spaces.shape_lists import PerArray, ShapeList


@dataclass
class Held:
    """A parameter, its gradient and its state, in a ledger."""

    item: Item
    p: ShapeOnly
    g: ShapeOnly
    state: dict[str, ShapeOnly]


Engine = Callable[[Ledger, Sequence[Held]], Iterator[tuple[Sequence[Held], Any]]]


def held(ledger: Ledger, item: Item) -> Held:
    p = ledger.array(item.tensor.shape, item.tensor.dtype)
    state = first_state(shapes, item.setting.rule_at(1), item.setting.handling, p)
    return Held(item, p, ledger.array(p.shape, p.dtype), state)


def stepped(
    space: Any, one: Item, p: Any, g: Any, state: Any, *, noise: Any = None, stacked: int = 0, rule: Any = None
) -> Advance:
    rule = rule or one.setting.rule_at(1)
    if stacked:
        rule = replace(rule, stacked_axes=rule.stacked_axes + stacked)
    return advance(
        space,
        rule,
        one.setting.handling,
        p,
        g,
        state,
        t=1,
        lr=LR,
        lr_scale=1.0,
        tensor=0,
        grad_scale=None if one.setting.handling.max_grad_norm is None else 1.0,
        noise=noise,
    )


# ---- torch


def torch_peak(items: Sequence[Item], *, engine: str, device: str) -> tuple[int, str]:
    """Bytes at the peak, and the engines that serve these parameters."""
    policy = items[0].setting.handling.on_nonfinite if items else "propagate"
    ledger = Ledger("torch", selects=device == "cuda" and policy == "skip")
    buckets: dict[Any, list[Held]] = defaultdict(list)
    for item in items:
        kind = item.setting.rule_at(1).kind(item.tensor.shape)
        key = item.setting, item.tensor.dtype, kind, torch_unserved(item, device)
        buckets[key].append(held(ledger, item))
    chosen = {key: torch_engine(engine, bucket, key[-1]) for key, bucket in buckets.items()}
    fused = [key for key, name in chosen.items() if name == "fused"]
    if device == "cuda":
        in_place = fused
        scratch = gpus.scratch_bytes([(key[0], [shown(one.item) for one in buckets[key]]) for key in in_place])
        joint = gpus.joint_bytes([[one.item for one in bucket] for bucket in buckets.values()])
    else:
        in_place = [key for key in fused if native.is_served(key[0])]
        scratch, joint = native.scratch_bytes([one.item for key in in_place for one in buckets[key]]), 0
    ledger.begin()
    engines: dict[str, Engine] = {"reference": by_tensor, "foreach": by_list, "fused": by_shape}
    results: Iterable[Any] = (
        result
        for key, bucket in buckets.items()
        if key not in in_place
        for result in engines[chosen[key]](ledger, bucket)
    )
    if policy == "raise":
        results = list(results)
    for _ in results:  # the last result is alive while the next is computed
        pass
    return scratch + max(ledger.extra, joint), " + ".join(sorted(set(chosen.values())))


def torch_unserved(item: Item, device: str) -> str | None:
    """Why native code, or a fused kernel on a GPU, cannot step a parameter; None or "" if it can."""
    if device == "cuda":
        return gpus.reason_against(item.setting, item.tensor)
    return reason_unserved(item.setting.rule_at(1), item.tensor.shape) or reason_missing()


def shown(item: Item) -> gpus.Shown:
    """A parameter as kernels for GPUs are shown it."""
    return gpus.Shown(item.tensor.shape, item.tensor.dtype, state_entries(item.setting, item.tensor))


def torch_engine(wanted: str, bucket: Sequence[Held], unserved: str | None) -> str:
    if wanted != "auto":
        return wanted
    if not unserved:
        return "fused"
    return "reference" if len(bucket) == 1 else "foreach"


def by_tensor(
    ledger: Ledger, bucket: Sequence[Held], *, native_noise: bool = False
) -> Iterator[tuple[Sequence[Held], Any]]:
    for one in bucket:
        noise = single_noise(ledger, one) if native_noise else None
        result = stepped(shapes, one.item, one.p, one.g, one.state, noise=noise)
        yield [one], result


def by_list(ledger: Ledger, bucket: Sequence[Held]) -> Iterator[tuple[Sequence[Held], Any]]:
    for chunk in chunks(bucket):
        result = listed(ledger, chunk)
        yield chunk, result


def listed(ledger: Ledger, chunk: Sequence[Held], rule: Any = None) -> Advance:
    """A list of parameters, stepped together."""
    first = chunk[0]
    return advance(
        shape_lists,
        rule or first.item.setting.rule_at(1),
        first.item.setting.handling,
        ShapeList([one.p for one in chunk]),
        ShapeList([one.g for one in chunk]),
        {key: ShapeList([one.state[key] for one in chunk]) for key in first.state},
        t=1,
        lr=LR,
        lr_scale=1.0,
        tensor=PerArray(ledger.array((len(chunk),), "int64")),
        grad_scale=None if first.item.setting.handling.max_grad_norm is None else 1.0,
    )


def chunks(bucket: Sequence[Held], limit: int = CHUNK) -> Iterator[Sequence[Held]]:
    """Parts of at most so many elements, or of one tensor that is larger."""
    extents = (extent(math.prod(one.p.shape), (math.prod(e.shape) for e in one.state.values())) for one in bucket)
    for members in pieces(extents, limit):
        yield [bucket[i] for i in members]


def by_shape(ledger: Ledger, bucket: Sequence[Held]) -> Iterator[tuple[Sequence[Held], Any]]:
    """Kron on CPUs: noise by native code, small tensors of equal shape as one batch."""
    first = bucket[0]
    if len(bucket) == 1 or is_apart(first.item) or first.item.tensor.elements > SMALL:
        yield from by_tensor(ledger, bucket, native_noise=True)
        return
    for part in chunks(bucket, STACK):
        yield part, as_stack(ledger, part)


def as_stack(ledger: Ledger, bucket: Sequence[Held]) -> Advance:
    """Parameters of equal shape, stepped as one with a leading axis more."""
    p, g, state = stacked(ledger, bucket)
    return stepped(shapes, bucket[0].item, p, g, state, noise=batch_noise(ledger, bucket), stacked=1)


def is_apart(item: Item) -> bool:
    """Whether a parameter is not stacked with others."""
    handling = item.setting.handling
    return handling.on_nonfinite != "propagate" or handling.rounding == "stochastic"


def stacked(ledger: Ledger, bucket: Sequence[Held]) -> tuple[ShapeOnly, ShapeOnly, dict[str, ShapeOnly]]:
    first, many = bucket[0], len(bucket)
    state = {
        key: entry if key == "refresh" else ledger.array((many, *entry.shape), entry.dtype)
        for key, entry in first.state.items()
    }
    p, g = (ledger.array((many, *x.shape), x.dtype) for x in (first.p, first.g))
    return p, g, state


def single_noise(ledger: Ledger, one: Held) -> Callable[[], ShapeOnly]:
    return lambda: ledger.array((1, *one.p.shape), arithmetic(one.p.dtype))[0]


def batch_noise(ledger: Ledger, bucket: Sequence[Held]) -> Callable[[], ShapeOnly]:
    first = bucket[0].p
    return lambda: ledger.array((len(bucket), *first.shape), arithmetic(first.dtype))


# ---- numpy


def numpy_peak(items: Sequence[Item], *, engine: str) -> tuple[int, str]:
    """Bytes at the peak, and the engines that serve these parameters."""
    ledger = Ledger("numpy")
    jobs = [held(ledger, item) for item in items]
    by_native = [engine != "reference" and is_native(job.item, engine) for job in jobs]
    fused = [job for job, native in zip(jobs, by_native, strict=True) if native]
    others = [job for job, native in zip(jobs, by_native, strict=True) if not native]
    used = " + ".join(name for name, some in (("fused", fused), ("reference", others)) if some)
    in_place = fused if items and native.is_served(items[0].setting) else []
    del jobs
    ledger.begin()
    squares = peak_of_squares(ledger, others) if engine == "reference" or reason_missing() else 0
    results: Iterable[tuple[Held, Advance]] = numpy_results(ledger, others, [] if in_place else fused)
    if items and items[0].setting.handling.on_nonfinite == "raise":
        results = list(results)
    for job, result in results:
        job.state = result.state  # the old one is let go
    return native.scratch_bytes([job.item for job in in_place]) + max(ledger.extra, squares), used


def is_native(item: Item, engine: str) -> bool:
    reason = reason_missing() or reason_unserved(item.setting.rule_at(1), item.tensor.shape)
    return engine == "fused" or not reason


def peak_of_squares(ledger: Ledger, jobs: Sequence[Held]) -> int:
    """The squares of the largest gradient, in float64, where all gradients are clipped together."""
    clipped = jobs and jobs[0].item.setting.handling.max_grad_norm is not None
    return 8 * max(job.item.tensor.elements for job in jobs) if clipped else 0


def numpy_results(ledger: Ledger, others: Sequence[Held], fused: Sequence[Held]) -> Iterator[tuple[Held, Advance]]:
    for job in others:
        yield job, stepped(shapes, job.item, job.p, job.g, job.state)
    for batch in batches(fused):
        if len(batch) == 1:
            (job,) = batch
            yield job, stepped(shapes, job.item, job.p, job.g, job.state, noise=single_noise(ledger, job))
            continue
        result = as_stack(ledger, batch)
        for index, job in enumerate(batch):
            part = slice_of(result, index)
            yield job, part._replace(state={key: entry.new() for key, entry in part.state.items()})


def batches(jobs: Sequence[Held]) -> Iterator[Sequence[Held]]:
    """The jobs, those together that are stepped as one."""
    found: dict[Any, list[Held]] = defaultdict(list)
    for index, job in enumerate(jobs):
        alone = is_apart(job.item) or job.item.tensor.elements > SMALL
        found[index if alone else (job.item.setting, job.p.shape, job.p.dtype)].append(job)
    for batch in found.values():
        yield from chunks(batch, STACK)
