"""How much memory a step needs beyond parameters, gradients and state, at its peak.

Engines that work in place say themselves what they keep. For those that answer with new values there is a bound: the
temporaries of the rule (``programs.footprint``), of as many parameters at a time as ``kernels.chunks`` allows, as if
all of a list had their most at the same moment. State is there already: these are the peaks of a step after the first.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from typing import Any, NamedTuple

from thalweg.kernels.chunks import CHUNK, SMALL, STACK, WHOLE_CHUNK, extent, pieces
from thalweg.kernels.cpu.library import reason_missing
from thalweg.kernels.cpu.reasons import reason_unserved
from thalweg.kernels.threads import num_threads, of_machine
from thalweg.kernels.triton.served import can_be_parted, reason_against, steps_by_hand
from thalweg.plan.items import Item, sort_items
from thalweg.programs.budget import entry_bytes
from thalweg.programs.footprint import LR, Footprint, footprint
from thalweg.rules import WholeRule
from thalweg.rules.entries import Factor
from thalweg.storage import Kept

#: Elements of tensors that kernels lay out together, about: tables of larger models would fill memory here.
MOST_AT_ONCE = 2**29
#: Memory that a device gives out begins at multiples of this.
ALIGNED = 512
#: Elements that torch's norms of a list of tensors add up in one piece.
NORMED = 2**16
#: Without torch and Triton kernels cannot be asked. What they keep is taken to be one in so many bytes of the
#: parameters in float32; for Kron so many times a parameter and its factors, as many together as this memory holds.
SHARE, KRON_SHARE, KRON_TOGETHER = 1 / 200, 2.5, 256 * 2**20
#: What bounds have on top, for what is not arrays: copies within operations, and in numpy Python's own objects.
ON_TOP, OBJECTS = 1.01, 2**16


class Peak(NamedTuple):
    """Bytes at the peak, and the engines that step; None: the compiler decides. is_bound: it may be less."""

    bytes: int | None
    engine: str
    is_bound: bool = False
    #: Of the bytes, those of messages.
    slots: int = 0


# ---- torch


def torch_peak(items: Sequence[Item], *, engine: str, device: str) -> Peak:
    ways: dict[str, list[list[Item]]] = {}
    in_place: list[list[Item]] = []
    for bucket in sort_items(items, lambda item: (item.kind, bool(why_unfused(item, device)))):
        fastest = "fused" if not why_unfused(bucket[0], device) else "reference" if len(bucket) == 1 else "foreach"
        way = fastest if engine == "auto" else engine
        is_list = way != "fused" or (device == "cpu" and bucket[0].rule.needs_whole)
        ways.setdefault(way, [])
        (ways[way] if is_list else in_place).append(bucket)
    policy = items[0].setting.handling.on_nonfinite if items else "propagate"
    selects = device == "cuda" and any(item.setting.handling.may_skip for item in items)
    steps = [step for way, own in ways.items() for b in own for step in steps_of(b, way, device, selects=selects)]
    most, used = round(ON_TOP * in_turn(steps, together=policy == "raise")), " + ".join(sorted(ways))
    if device == "cuda":
        buckets = [bucket for own in ways.values() for bucket in own]
        if buckets or any(bucket[0].across(None) for bucket in in_place):  # else kernels measure gradients themselves
            buckets += in_place
        # between fused kernels, stacks of whole tensors are multiplied by libraries
        is_bound = bool(steps) or any(b[0].rule.needs_whole and not is_by_hand(b[0]) for b in in_place)
        return Peak(gpu_scratch(in_place) + max(most, joint_bytes(buckets)), used, is_bound)
    return Peak(native_scratch([item for bucket in in_place for item in bucket]) + most, used, bool(steps))


def why_unfused(item: Item, device: str) -> str | None:
    """Why native code, or a fused kernel on a GPU, cannot step a parameter; None or "" if it can."""
    if device == "cuda":
        kind = item.setting, item.shape, item.tensor.dtype, item.entries
        reason = reason_against(*kind)
        return "" if reason and not item.across(None) and can_be_parted(*kind) else reason
    return reason_unserved(item.rule, item.setting.handling, item.tensor.shape, item.tensor.dtype) or reason_missing()


def is_by_hand(item: Item) -> bool:
    return steps_by_hand(item.setting, item.shape, item.tensor.dtype, item.entries)


# ---- engines that answer with new values


class Step(NamedTuple):
    """Some parameters that are stepped together: bytes at the peak, and of new values and of new parameters."""

    peak: int
    result: int
    parameter: int
    is_copy: bool = False


def steps_of(bucket: Sequence[Item], way: str, device: str = "cpu", **ways: Any) -> Iterator[Step]:
    """Steps of an engine of lists, one after the other."""
    if not bucket:
        return
    handling, rule, shape = bucket[0].setting.handling, bucket[0].rule, bucket[0].shape
    apart = handling.on_nonfinite != "propagate" or handling.may_skip or handling.is_random
    shown = isinstance(rule, WholeRule) and rule.is_stackable(shape)
    copies = way == "fused" or (way == "foreach" and isinstance(rule, WholeRule) and not shown and not apart)

    def alike(item: Item) -> Any:
        return (item.tensor.name if apart or item.tensor.elements > SMALL else None), item.kind, item.tensor.shape

    if way == "reference":
        parts: Iterable[Sequence[Item]] = ([item] for item in bucket)
    elif way == "foreach":
        parts = cut(bucket, WHOLE_CHUNK if device == "cuda" and shown else CHUNK)
        ways["given_noise"] = draws_apart(bucket[0], device)
    else:  # Kron on CPUs: noise by native code, small tensors of equal shape as one stack
        parts = (part for stack in sort_items(bucket, alike) for part in cut(stack, STACK))
        ways["given_noise"] = True
    for part in parts:
        step = add_footprints([measure_item(item, **ways) for item in part])
        # a stack holds copies, with gradients and state
        copied = sum(map(size_of, part)) if copies and len(part) > 1 else 0
        yield step._replace(peak=step.peak + copied, is_copy=copied > 0)


def draws_apart(item: Item, device: str) -> bool:
    """Whether native code or a kernel draws the noise of a parameter, without temporaries."""
    knows_step = not item.setting.handling.may_skip or device == "cpu"
    has_code = reason_missing() is None if device == "cpu" else item.tensor.dtype == "float32"
    return isinstance(item.rule, WholeRule) and knows_step and has_code


def measure_item(item: Item, **ways: Any) -> Footprint:
    return footprint(item.setting, item.tensor.shape, item.tensor.dtype, whole=item.whole, **ways)


def size_of(item: Item) -> int:
    """Bytes of a parameter, its gradient and its state."""
    return sum(map(entry_bytes, (*[(item.tensor.shape, item.tensor.dtype)] * 2, *item.entries.values())))


def add_footprints(several: Sequence[Footprint]) -> Step:
    peak, result = sum(own.peak for own in several), sum(own.result for own in several)
    return Step(peak, result, sum(own.parameter for own in several))


def cut(bucket: Sequence[Item], limit: int) -> Iterator[Sequence[Item]]:
    """Parts of at most so many elements, or of one tensor that is larger."""
    extents = (extent(one.tensor.elements, (math.prod(shape) for shape, _ in one.entries.values())) for one in bucket)
    for members in pieces(extents, limit):
        yield [bucket[i] for i in members]


def in_turn(steps: Iterable[Step], *, together: bool = False, committed: bool = False) -> int:
    """Bytes at the peak of steps one after the other: while one is computed, the result before it is still there.

    together: nothing is written before all are computed. committed: new state has taken the place of the old one by
    then, but for that of a stack, which is copied.
    """
    peak = before = 0
    for step in steps:
        peak = max(peak, before + step.peak)
        left = step.parameter if committed and not step.is_copy else step.result
        before = before + step.result if together else left
    return peak


# ---- native code


def native_scratch(items: Sequence[Item]) -> int:
    if not items:
        return 0
    from thalweg.kernels.cpu.operands import operand_of
    from thalweg.kernels.cpu.scratch import scratch_bytes
    from thalweg.kernels.cpu.tables import Options

    settings = list(dict.fromkeys(item.setting for item in items))
    options = [Options(setting.rule_at(1), setting.handling, 1, LR, 1.0) for setting in settings]

    def place(kept: Kept) -> tuple[int, str]:
        return 1, kept[1]  # wherever it is

    operands = [
        operand_of(
            *(item.rule, own.name, own.shape, (own.shape, own.dtype), own.dtype, item.entries, place),
            group=settings.index(item.setting),
            whole=item.whole,
        )
        for item, own in ((item, item.tensor) for item in items)
    ]
    return scratch_bytes(operands, options, num_threads(of_machine))


# ---- kernels for GPUs


def gpu_scratch(buckets: Sequence[Sequence[Item]], at_once: int = MOST_AT_ONCE) -> int:
    """What kernels keep from step to step: they say so themselves where torch and Triton are installed.

    at_once: elements of tensors that kernels lay out together, about.
    """
    if not buckets:
        return 0
    if any(importlib.util.find_spec(name) is None for name in ("torch", "triton")):
        return estimate(buckets)
    from thalweg.torch.engines.scratch import Ghost, scratch_bytes

    def ghost(item: Item) -> Ghost:
        whole = item.whole if item.across(None) else None
        return Ghost(item.tensor.shape, item.tensor.dtype, tuple(item.entries.items()), whole)

    settled = [(replace(bucket[0].setting, rule=bucket[0].rule), bucket) for bucket in buckets]
    return scratch_bytes([(s, [ghost(item) for item in part]) for s, own in settled for part in portions(own, at_once)])


def estimate(buckets: Sequence[Sequence[Item]]) -> int:
    """The same without asking."""
    total, shared = 0.0, 0.0
    for bucket in buckets:
        first = bucket[0]
        if is_by_hand(first):
            factors = [first.entries[key][0] for key in first.rule.keys(first.shape, Factor)]
            needed = KRON_SHARE * 4 * (first.tensor.elements + sum(map(math.prod, factors)))
            shared = max(shared, needed * min(len(bucket), max(1, KRON_TOGETHER // needed)))
        else:
            total += SHARE * 4 * sum(item.tensor.elements for item in bucket)
    return round(total + shared)


def portions(bucket: Sequence[Item], at_once: int = MOST_AT_ONCE) -> Iterator[Sequence[Item]]:
    """Pieces of about equal size, each of whole tensors. Those of rules that need whole tensors have small tables."""
    bucket = sorted(bucket, key=lambda item: item.tensor.shape)  # equal pieces are laid out once
    *starts, total = accumulate((item.tensor.elements for item in bucket), initial=0)
    count = 1 if bucket[0].rule.needs_whole else max(1, -(-total // at_once))
    # tensors without elements at the end belong to the last piece
    numbers = [min(start * count // max(1, total), count - 1) for start in starts]
    for _, some in groupby(zip(numbers, bucket, strict=True), lambda pair: pair[0]):
        yield [item for _, item in some]


def joint_bytes(buckets: Sequence[Sequence[Item]]) -> int:
    """What it takes to know the joint norm of all gradients before a step, list after list; 0 if no option needs it."""
    handlings = [bucket[0].setting.handling for bucket in buckets]
    if not any(handling.needs_norm or handling.may_skip for handling in handlings):
        return 0
    # a number for each piece of each tensor, as if all had as many as the largest, and then one for each tensor
    most = [max(-(-item.tensor.elements // NORMED) for item in bucket) for bucket in buckets]
    return max(aligned(4 * len(b) * pieces_) + ALIGNED * len(b) for b, pieces_ in zip(buckets, most, strict=True))


# ---- numpy


def numpy_peak(items: Sequence[Item], *, engine: str) -> Peak:
    def is_fused(item: Item) -> bool:
        return engine == "fused" or (engine == "auto" and not why_unfused(item, "cpu"))

    fused, others = ([item for item in items if is_fused(item) is wanted] for wanted in (True, False))
    in_place, stacked = ([item for item in fused if item.rule.needs_whole is wanted] for wanted in (False, True))
    steps = [*steps_of(others, "reference", library="numpy"), *steps_of(stacked, "fused", library="numpy")]
    handling = items[0].setting.handling if items else None
    most = in_turn(steps, committed=True, together=handling is not None and handling.on_nonfinite == "raise")
    if handling is not None and handling.needs_norm and (engine == "reference" or reason_missing()):
        # before that the squares of each gradient, in float64
        most = max(most, 8 * max(item.tensor.elements for item in items))
    used = " + ".join(name for name, some in (("fused", fused), ("reference", others)) if some)
    bound = round(ON_TOP * most) + OBJECTS if steps else 0
    return Peak(native_scratch(in_place) + bound, used, bool(steps))


def aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
