"""Sharded parameters: what ranks tell one another, and what owners of whole tensors keep and need.

Rules are run on shards as ``spaces.sharded`` runs them: shapes are those of the whole, and sums along a sharded axis
cross ranks. What crosses in one round goes in one message for each mesh dimension. Rules that need whole tensors have
owners (``thalweg.rules.whole``), with the messages of ``torch.sharding.owners``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from thalweg.kernels.chunks import CHUNK
from thalweg.kernels.cpu import served as native
from thalweg.kernels.triton import served as kernels
from thalweg.plan.items import Item, entry_bytes, shard, sort_items
from thalweg.plan.memory import gpu_scratch, in_blocks, joint_bytes, why_unfused
from thalweg.programs.footprint import footprint, middle_peak
from thalweg.rules import Kron, WholeRule
from thalweg.rules.entries import Entry, Factor, PerSlice, Square
from thalweg.rules.whole import is_remembered, owners_of
from thalweg.spaces.shapes import BYTES, ORDER
from thalweg.storage import Kept, arithmetic

#: The axes along which FSDP2 shards parameters.
DIVIDED = (0,)


def reason_against_part(item: Item, device: str) -> str:
    """Why native code, or a kernel on a GPU, cannot step a part of a parameter, "" if it can."""
    reason_against = kernels.reason_against_shard if device == "cuda" else native.reason_against_shard
    return reason_against(item.setting, item.shape, DIVIDED)


def is_launched(item: Item, device: str, engine: str) -> bool:
    """Whether kernels for GPUs step a part, or whiten the whole for its owner."""
    if device != "cuda" or engine not in ("auto", "fused"):
        return False
    return not (why_unfused(whole_of(item), device) or reason_against_part(item, device))


def whole_of(item: Item) -> Item:
    """The whole parameter of which an item is a part."""
    return Item(replace(item.tensor, shape=item.shape), item.setting)


# ---- sums that cross ranks


class Figures(NamedTuple):
    """What a parameter adds to one round."""

    kind: str
    numbers: int
    dtype: str
    #: The mesh dimensions it crosses.
    mesh: tuple[str, ...]


def rounds_of(item: Item) -> list[list[Figures]]:
    """What a step of one parameter asks of other ranks, round by round."""
    found = footprint(
        item.setting, item.tensor.shape, item.tensor.dtype, whole=item.shape, by_owners=item.rule.needs_whole
    )
    told = []
    for together in found.reductions:
        # what has no axes is one number for a tensor already, and known to all
        asked = [
            Figures(own.kind, count_of(own.shape, own.axes), own.dtype, item.across(own.axes))
            for own in together
            if own.shape and item.across(own.axes)
        ]
        if asked:
            told.append(asked)
    keeps_all = any(isinstance(entry, Square) and not entry.over for entry in item.rule.entries(item.shape).values())
    if keeps_all and len(told) > 1 and told[1][0].kind == "sum":
        told[:2] = [told[0] + told[1]]  # where all squares are kept, those of u need no sum before them
    return told


def count_of(shape: tuple[int, ...], axes: Sequence[int] | None) -> int:
    """How many numbers are left of a shape that is summed along some axes."""
    if axes is None:
        return 1
    along = {axis % len(shape) for axis in axes}
    return math.prod(size for axis, size in enumerate(shape) if axis not in along)


def messages(items: Sequence[Item], by_kernels: Sequence[bool] | None = None) -> dict[tuple[int, str, str], int]:
    """Bytes of every message of a step, by round, kind and mesh dimension. by_kernels: what kernels for GPUs step."""
    asked: list[tuple[int, Figures]] = []
    for item, own in zip(items, by_kernels or [False] * len(items), strict=True):
        handling = item.setting.handling
        if handling.max_grad_norm is not None or handling.on_nonfinite == "skip":
            # squares of all gradients, before anything else
            asked.append((0, Figures("sum", 1, arithmetic(item.tensor.dtype), item.across(None))))
        passed: Counter[str] = Counter()  # sums are asked for together, and so are maxima
        for told in rounds_of(item):
            kind = "sum" if own else told[0].kind  # kernels for GPUs have nothing but sums
            passed[kind] += 1
            asked += [(passed[kind], figures._replace(kind=kind)) for figures in told]
    gathered: dict[tuple[int, str, str], list[Figures]] = {}
    for number, figures in sorted(asked, key=lambda pair: pair[0]):
        for dimension in figures.mesh:
            gathered.setdefault((number, figures.kind, dimension), []).append(figures)
    return {key: BYTES[widest(f.dtype for f in own)] * sum(f.numbers for f in own) for key, own in gathered.items()}


def widest(dtypes: Iterable[str]) -> str:
    """All of a message is in the widest of its dtypes."""
    return max(dtypes, key=ORDER.index, default="float32")


def ring(total: int, world: int) -> int:
    """What each rank sends in a ring that sums so many bytes over all ranks."""
    return round(2 * (world - 1) / world * total)


def kernel_peak(items: Sequence[Item], sums: Sequence[int]) -> int:
    """Bytes at the peak where kernels for GPUs step parts in place: what they keep, and the largest message."""
    buckets = sort_items(items, lambda item: (item.kind, item.mesh))
    return gpu_scratch(buckets) + max([joint_bytes(buckets), *map(in_blocks, sums)])


# ---- owners


def whole_rule(item: Item) -> WholeRule:
    assert isinstance(item.rule, WholeRule)
    return item.rule


def owners(items: Sequence[Item], world: int) -> list[int | None]:
    """The owner of each whole tensor. None: it has no axes, and all ranks do it."""
    chosen = iter(
        owners_of([(item.tensor.name, whole_rule(item).cost(item.shape)) for item in items if item.shape], world)
    )
    return [next(chosen) if item.shape else None for item in items]


def kept_entries(item: Item, world: int, rank: int) -> dict[str, Kept]:
    """What a rank keeps of a parameter's state: momentum like the parameter, and rows of every factor."""
    kept = item.entries
    if item.shape and item.rule.needs_whole:
        for key in item.rule.keys(item.shape, Factor):
            shape, dtype = kept[key]
            kept[key] = (shard(shape[0], world, rank), *shape[1:]), dtype
    return kept


def counts(item: Item, role: type[Entry]) -> dict[str, int]:
    """The elements of each whole entry of a role."""
    entries = item.entries
    return {key: math.prod(entries[key][0]) for key in item.rule.keys(item.shape, role)}


def factor_bytes(item: Item) -> int:
    """Bytes of the factors that an owner puts together, in the precision of the arithmetic."""
    return BYTES[arithmetic(item.tensor.dtype)] * sum(counts(item, Factor).values())


def kept_by_owner(item: Item, *, by_kernels: bool) -> int:
    """Bytes of whole factors between steps. Kernels write them in place, as they are stored, and their norms too."""
    if not by_kernels:
        return factor_bytes(item) if remembers(item) else 0
    return sum(entry_bytes(item.entries[key]) for key in item.rule.keys(item.shape, PerSlice))


def remembers(item: Item) -> bool:
    return is_remembered(item.setting.handling.on_nonfinite)


def rows_of_factors(item: Item, world: int, rank: int) -> int:
    """The elements of a parameter's factors that a rank keeps."""
    kept = kept_entries(item, world, rank)
    return sum(math.prod(kept[key][0]) for key in item.rule.keys(item.shape, Factor))


def word(items: Sequence[Item]) -> int:
    """Bytes of a number in a message: all of it is in the widest dtype of what is shown of its tensors."""
    return BYTES[widest(whole_rule(item).whole_dtype(arithmetic(item.tensor.dtype)) for item in items)]


def exchanged_bytes(items: Sequence[Item], owned: Sequence[int | None], world: int, rank: int, *, refresh: bool) -> int:
    """What a rank sends in the two messages of a step; a refresh sends every rank its rows of the factors."""
    sent, size = 0, word([item for item, owner in zip(items, owned, strict=True) if owner is not None])
    for item, owner in zip(items, owned, strict=True):
        if owner is None:
            continue
        rule, rows = whole_rule(item), rows_of_factors(item, world, rank)
        if owner != rank:
            sent += rule.whole_tensors() * item.tensor.elements + (0 if remembers(item) else rows)
            continue
        figures = len(rule.FIGURES) * math.prod(rule.figure_shape(item.shape)) * (2 if size == 2 else 1)
        sent += math.prod(item.shape) - item.tensor.elements + (world - 1) * figures
        if refresh:
            factors = counts(item, Factor)
            others = {key: count for key, count in counts(item, PerSlice).items() if key not in factors}
            sent += sum(factors.values()) - rows + (world - 1) * sum(others.values())
    return sent * size


def owner_peak(
    items: Sequence[Item], owned: Sequence[int | None], by_kernels: Sequence[bool], world: int, rank: int
) -> int:
    """Bytes at the peak of a step that refreshes; a message is there twice while it is put together.

    by_kernels: for which parameters owners have kernels for GPUs.
    """
    size = word(items)
    on_parts = [footprint(i.setting, i.tensor.shape, i.tensor.dtype, whole=i.shape, by_owners=True) for i in items]
    waiting, after = sum(own.waiting for own in on_parts), sum(own.peak for own in on_parts)
    seen = max(whole_rule(item).whole_tensors() for item in items)
    mine = [(whole_of(item), own) for item, owner, own in zip(items, owned, by_kernels, strict=True) if owner == rank]
    launched, listed = ([item for item, own in mine if own is chosen] for chosen in (True, False))
    everyone = [item for item, owner, own in zip(items, owned, by_kernels, strict=True) if owner is None and own]
    given = size * sum(item.tensor.elements for item in items)
    whole, for_kernels = (size * sum(i.tensor.elements for i in some) for some in ([i for i, _ in mine], launched))
    factors = sum(factor_bytes(item) for item, _ in mine)
    rows = size * sum(rows_of_factors(item, world, rank) for item in items)
    going, came = seen * given, seen * whole
    if not all(map(remembers, items)):
        going, came = going + rows, came + factors
    fresh = sum(factor_bytes(item) for item in listed if is_made_anew(item))
    # what there are kernels for is put together first; the rest one after the other, from what came to what goes back
    stacked, single = ([i for i in listed if whole_rule(i).is_stackable(i.shape) is chosen] for chosen in (True, False))
    working = came + seen * for_kernels + fresh + (whole - for_kernels)
    working += max((work_peak(item) for item in single), default=0)
    # stacks are made when all is put together
    working = max(working, seen * whole + whole + stack_peak(stacked))
    returning = whole + fresh + 2 * (whole + factors) + given + rows
    most = max(waiting + max(2 * going + came, working, returning), after)
    # an owner has kernels for its tensors, in addition to those for tensors that every rank has whole
    return most + sum(gpu_scratch(bare_buckets(some)) for some in (launched, everyone))


def is_made_anew(item: Item) -> bool:
    """Whether refreshed factors on their way are beside those that their owner keeps: if it keeps none, or rounded."""
    entries, factors = item.entries, item.rule.keys(item.shape, Factor)
    return not remembers(item) or any(entries[key][1] != arithmetic(item.tensor.dtype) for key in factors)


def without_momentum(item: Item) -> Item:
    """As owners have it: they whiten, and each rank averages its own part."""
    assert isinstance(item.setting.rule, Kron)
    return replace(item, setting=replace(item.setting, rule=replace(item.setting.rule, momentum=0.0)))


def bare_buckets(items: Sequence[Item]) -> list[list[Item]]:
    """Whole tensors as kernels whiten them: those of one shape together, in float32."""
    bare = [without_momentum(replace(i, tensor=replace(i.tensor, dtype="float32"))) for i in map(whole_of, items)]
    return sort_items(bare, lambda item: (item.setting, item.shape))


def work_peak(item: Item) -> int:
    """What an owner needs for one tensor, which it first puts together."""
    rule = whole_rule(item)
    put_together = rule.whole_tensors() * word([item]) * item.tensor.elements
    if not remembers(item):
        put_together += factor_bytes(item)
    if not isinstance(rule, Kron):
        return put_together + middle_peak(rule, item.shape, arithmetic(item.tensor.dtype))
    return put_together + footprint(without_momentum(item).setting, item.shape, item.tensor.dtype).peak


def stack_peak(items: Sequence[Item]) -> int:
    """What an owner needs for tensors that it has put together, those of one shape as one stack."""
    found = 0
    for alike in sort_items(items, lambda item: (item.setting, item.shape, item.tensor.dtype)):
        first = alike[0]
        count = min(len(alike), max(1, CHUNK // max(1, first.tensor.elements)))
        found = max(found, middle_peak(whole_rule(first), first.shape, arithmetic(first.tensor.dtype), count))
    return found
