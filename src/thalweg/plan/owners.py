"""Rules that need whole tensors on sharded parameters: each has an owner, a rank that works on the whole tensor.

What a rule shows travels to the owners and what they made of them travels back. Messages are those of
``torch/sharding/owners.py``.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from thalweg.arrays import Shape
from thalweg.kernels.chunks import CHUNK
from thalweg.plan import gpus
from thalweg.plan.costs import shard
from thalweg.plan.items import Entry, Item, entry_bytes, state_entries
from thalweg.plan.models import Tensor
from thalweg.plan.parts import OnParts, Part, nameless
from thalweg.plan.peaks import Held, torch_peak
from thalweg.plan.peaks import listed as stepped_as_list
from thalweg.programs.liveness import made_peak
from thalweg.rules import Kron, WholeRule
from thalweg.rules.entries import Entry as Declared
from thalweg.rules.entries import Factor, PerSlice
from thalweg.rules.whole import is_remembered as are_factors_remembered
from thalweg.rules.whole import owners_of
from thalweg.settings import Setting
from thalweg.spaces.shape_arrays import BYTES, ORDER, Ledger
from thalweg.storage import arithmetic


def owners(setting: Setting, tensors: Sequence[Tensor], world: int) -> tuple[int | None, ...]:
    """The owner of each tensor. None: it has no axes, and all ranks do it."""
    rule = rule_of(setting)
    chosen = iter(owners_of([(own.name, rule.cost(own.shape)) for own in tensors if own.shape], world))
    return tuple(next(chosen) if tensor.shape else None for tensor in tensors)


def rule_of(setting: Setting) -> WholeRule:
    rule = setting.rule_at(1)
    assert isinstance(rule, WholeRule)
    return rule


def kept_entries(setting: Setting, part: Part, world: int, rank: int) -> dict[str, Entry]:
    """What a rank keeps of a parameter's state: momentum like the parameter, and rows of every factor."""
    if not part.whole.shape:
        return state_entries(setting, part.whole)
    kept = state_entries(setting, part.held, part.whole.shape)
    for key in rule_of(setting).keys(part.whole.shape, Factor):
        shape, dtype = kept[key]
        kept[key] = (shard(shape[0], world, rank), *shape[1:]), dtype
    return kept


def whole_factors(setting: Setting, tensor: Tensor) -> int:
    """Bytes of the factors that an owner puts together, in the precision of the arithmetic."""
    return BYTES[arithmetic(tensor.dtype)] * sum(counts(setting, tensor, Factor).values())


def kept_by_owner(setting: Setting, tensor: Tensor, *, by_kernels: bool) -> int:
    """Bytes of whole factors between steps. Kernels write them in place, as they are stored, and their norms too."""
    if not by_kernels:
        return whole_factors(setting, tensor) if is_remembered(setting) else 0
    entries = state_entries(setting, tensor)
    return sum(entry_bytes(entries[key]) for key in rule_of(setting).keys(tensor.shape, PerSlice))


def is_remembered(setting: Setting) -> bool:
    return are_factors_remembered(setting.handling.on_nonfinite)


def counts(setting: Setting, tensor: Tensor, role: type[Declared]) -> dict[str, int]:
    """The elements of each entry of a role."""
    entries = state_entries(setting, tensor)
    return {key: math.prod(entries[key][0]) for key in rule_of(setting).keys(tensor.shape, role)}


def rows_of_factors(setting: Setting, part: Part, world: int, rank: int) -> int:
    """The elements of a parameter's factors that a rank keeps."""
    kept = kept_entries(setting, part, world, rank)
    return sum(math.prod(kept[key][0]) for key in rule_of(setting).keys(part.whole.shape, Factor))


def word(setting: Setting, tensors: Sequence[Tensor]) -> int:
    """Bytes of a number in a message: all of it is in the widest dtype of what is shown of its tensors."""
    shown = (rule_of(setting).whole_dtype(arithmetic(tensor.dtype)) for tensor in tensors)
    return BYTES[max(shown, key=ORDER.index, default="float32")]


def exchanged_bytes(
    setting: Setting, parts: Sequence[Part], owned: Sequence[int | None], world: int, rank: int, *, refresh: bool
) -> int:
    """What a rank sends in the two messages of a step; a refresh sends every rank its rows of the factors."""
    rule, sent = rule_of(setting), 0
    size = word(setting, [part.whole for part, owner in zip(parts, owned, strict=True) if owner is not None])
    for part, owner in zip(parts, owned, strict=True):
        if owner is None:
            continue
        rows = rows_of_factors(setting, part, world, rank)
        if owner != rank:
            sent += rule.whole_tensors() * part.held.elements
            if not is_remembered(setting):
                sent += rows
            continue
        figures = len(rule.FIGURES) * math.prod(rule.figure_shape(part.whole.shape)) * (2 if size == 2 else 1)
        sent += part.whole.elements - part.held.elements + (world - 1) * figures
        if refresh:
            factors = counts(setting, part.whole, Factor)
            sent += sum(factors.values()) - rows
            others = {key: count for key, count in counts(setting, part.whole, PerSlice).items() if key not in factors}
            sent += (world - 1) * sum(others.values())
    return sent * size


# ---- memory during a step


def owner_peak(
    setting: Setting,
    parts: Sequence[Part],
    owned: Sequence[int | None],
    by_kernels: Sequence[bool],
    world: int,
    rank: int,
) -> tuple[int, str]:
    """Bytes at the peak of a step that refreshes; a message is there twice while it is put together.

    by_kernels: for which parameters owners have kernels for GPUs.
    """
    rule = rule_of(setting)
    size, seen = word(setting, [part.whole for part in parts]), rule.whole_tensors()
    waiting, after = peaks_on_parts(setting, parts, world, rank)
    mine = [(part.whole, own) for part, owner, own in zip(parts, owned, by_kernels, strict=True) if owner == rank]
    launched, listed = ([tensor for tensor, own in mine if own is chosen] for chosen in (True, False))
    everyone = [part.whole for part, owner, own in zip(parts, owned, by_kernels, strict=True) if owner is None and own]
    given, whole, for_kernels = (
        size * sum(tensor.elements for tensor in some)
        for some in ([part.held for part in parts], [tensor for tensor, _ in mine], launched)
    )
    factors = sum(whole_factors(setting, tensor) for tensor, _ in mine)
    rows = size * sum(rows_of_factors(setting, part, world, rank) for part in parts)
    going, came = seen * given, seen * whole
    if not is_remembered(setting):
        going, came = going + rows, came + factors
    fresh = sum(whole_factors(setting, tensor) for tensor in listed if is_made_anew(setting, tensor))
    # what there are kernels for is put together first; the rest one after the other, from what came to what goes back
    stacked, listed = (
        [tensor for tensor in listed if rule.is_stackable(tensor.shape) is chosen] for chosen in (True, False)
    )
    working = came + seen * for_kernels + fresh + (whole - for_kernels)
    working += max((work_peak(setting, nameless(tensor)) for tensor in listed), default=0)
    # stacks are made when all is put together
    working = max(working, seen * whole + whole + stack_peak(setting, stacked))
    whitening = seen * for_kernels + whole + fresh
    returning = whole + fresh + 2 * (whole + factors) + given + rows
    most = max(waiting + max(2 * going + came, working, whitening, returning), after)
    # an owner has kernels for its tensors, in addition to those for tensors that every rank has whole
    scratch = sum(gpus.scratch_bytes(buckets_of(setting, some)) for some in (launched, everyone))
    engines = {"fused" if own else "foreach" for own in by_kernels}
    return most + scratch, " + ".join(sorted(engines))


def is_made_anew(setting: Setting, tensor: Tensor) -> bool:
    """Whether refreshed factors on their way are beside those that their owner keeps: if it keeps none, or rounded."""
    entries, factors = state_entries(setting, tensor), rule_of(setting).keys(tensor.shape, Factor)
    return not is_remembered(setting) or any(entries[key][1] != arithmetic(tensor.dtype) for key in factors)


def buckets_of(setting: Setting, tensors: Sequence[Tensor]) -> list[gpus.Bucket]:
    """Whole tensors as kernels whiten them: those of one shape together, without momentum, in float32."""
    if not tensors:
        return []
    assert isinstance(setting.rule, Kron)
    bare = replace(setting, rule=replace(setting.rule, momentum=0.0))
    by_shape: dict[Shape, list[gpus.Shown]] = defaultdict(list)
    for tensor in tensors:
        by_shape[tensor.shape].append(gpus.Shown(tensor.shape, "float32", state_entries(bare, tensor)))
    return [(bare, some) for some in by_shape.values()]


@functools.lru_cache(maxsize=4096)
def work_peak(setting: Setting, tensor: Tensor) -> int:
    """What an owner needs for one tensor, which it first puts together."""
    rule = rule_of(setting)
    put_together = rule.whole_tensors() * word(setting, [tensor]) * tensor.elements
    if not is_remembered(setting):
        put_together += whole_factors(setting, tensor)
    if not isinstance(rule, Kron):
        return put_together + made_peak(rule, tensor.shape, arithmetic(tensor.dtype))
    bare = replace(setting, rule=replace(rule, momentum=0.0))
    return put_together + torch_peak([Item(tensor, bare)], engine="reference", device="cpu")[0]


def stack_peak(setting: Setting, tensors: Sequence[Tensor]) -> int:
    """What an owner needs for tensors that it has put together, those of one shape as one stack."""
    alike: dict[Tensor, int] = defaultdict(int)
    for tensor in tensors:
        alike[nameless(tensor)] += 1
    together = {tensor: min(count, max(1, CHUNK // max(1, tensor.elements))) for tensor, count in alike.items()}
    rule = rule_of(setting)
    return max((made_peak(rule, own.shape, arithmetic(own.dtype), count) for own, count in together.items()), default=0)


def peaks_on_parts(setting: Setting, parts: Sequence[Part], world: int, rank: int) -> tuple[int, int]:
    """What lists of parts hold while owners work, and the most they need afterwards, all of them at once."""
    waiting = after = 0
    buckets: dict[Any, list[Part]] = defaultdict(list)
    for part in parts:
        buckets[part.whole.shape, part.whole.dtype].append(part)
    for bucket in buckets.values():
        ledger = Ledger("torch")
        jobs = []
        for part in bucket:
            p, g = (ledger.array(part.held.shape, part.held.dtype) for _ in range(2))
            entries = kept_entries(setting, part, world, rank)
            state = {key: ledger.array(*entry) for key, entry in entries.items()}
            jobs.append(Held(Item(part.held, setting), p, g, state))
        ledger.begin()
        rule = OnParts(setting.rule_at(1), ledger)
        stepped_as_list(ledger, jobs, rule)
        waiting += rule.waiting
        after += ledger.extra
    return waiting, after
