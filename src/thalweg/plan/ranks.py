"""Sharded parameters: what ranks tell one another, and what owners of whole tensors keep and need.

A rule is run on shards round by round, as ``programs.evaluate`` orders its sums. What crosses ranks in one round goes
in one message for each mesh dimension. Rules that need whole tensors have owners (``thalweg.rules.whole``), with the
messages of ``torch.sharding.owners``.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from thalweg.arrays import Axes, Shape
from thalweg.errors import RuleError
from thalweg.kernels.chunks import CHUNK
from thalweg.kernels.cpu import reasons as native
from thalweg.kernels.triton import served as kernels
from thalweg.plan.items import Item, Place, shard, sort_items
from thalweg.plan.memory import aligned, gpu_scratch, joint_bytes, why_unfused
from thalweg.programs.budget import entry_bytes
from thalweg.programs.evaluate import order_for
from thalweg.programs.footprint import footprint, middle_peak
from thalweg.programs.graph import Value
from thalweg.rules import Kron, WholeRule
from thalweg.rules.entries import Entry, Factor, PerSlice
from thalweg.rules.whole import SLOT, is_worth_sending, no_loads, owners_of, slots_of
from thalweg.spaces.shapes import BYTES, ORDER
from thalweg.storage import Kept, arithmetic

#: The axes along which FSDP2 shards parameters.
DIVIDED = (0,)


def reason_against_part(item: Item, device: str) -> str:
    """Why native code, or a kernel on a GPU, cannot step a part of a parameter, "" if it can."""
    reason_against = kernels.reason_against_shard if device == "cuda" else native.reason_against_shard
    return reason_against(item.setting, item.shape, tuple(dict.fromkeys(cut.axis for cut in item.cuts)) or DIVIDED)


def find_kernels(item: Item, place: Place) -> Item:
    """An item that tells which kernels serve it."""
    if place.device != "cuda" or place.engine not in ("auto", "fused"):
        return item
    if why_unfused(item.whole_item(), place.device) or reason_against_part(item, place.device):
        return item
    by_owner = item.rule.needs_whole and (item.is_sharded or is_divided(item, place))
    parted = by_owner and kernels.is_parted(item.setting, item.shape)
    return replace(item, by_kernels=not is_stack(item), parted=parted)


def is_stack(item: Item) -> bool:
    return isinstance(item.rule, WholeRule) and item.rule.is_stackable(item.shape)


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
    try:
        own = rounds_as_asked(item, by_owners=True) if item.rule.needs_whole else rounds_of_program(item)
        rounds = [*own, *rounds_of_guards(item)]
    except RuleError:  # what cannot be traced is run as it is, and asks as it goes
        rounds = [*rounds_as_asked(item)]
    crossing = ([figures for figures in each if figures.mesh] for each in rounds)
    return [each for each in crossing if each]


def rounds_as_asked(item: Item, *, by_owners: bool = False) -> Iterator[list[Figures]]:
    """The sums that a rule asks for as it goes. by_owners: before they do their part, alone."""
    found = footprint(item.setting, item.tensor.shape, item.tensor.dtype, whole=item.shape, by_owners=by_owners)
    for asked in found.reductions:
        yield [figures_of(item, own.kind, own.shape, own.axes) for own in asked if own.shape]


def rounds_of_program(item: Item) -> Iterator[list[Figures]]:
    """The sums of a traced rule."""
    rule = item.rule
    order = order_for(rule, item.setting.rule, tuple(rule.entries(item.shape)), item.shape, with_lr=True)
    for _, reductions in order.rounds:
        if reductions:
            kinds = {"amax": "max"}
            yield [figures_of(item, kinds.get(v.op, "sum"), held_shape(item, v.args[0]), v.axes) for v in reductions]
    finite = order.program.finite
    if item.setting.handling.on_nonfinite != "propagate" and isinstance(finite, Value) and finite.extent:
        yield [figures_of(item, "sum", held_shape(item, finite), None)]


def rounds_of_guards(item: Item) -> Iterator[list[Figures]]:
    """Whether what is written is finite, each with a round of its own; float16 ends at 65504."""
    narrow = [key for key, (_, dtype) in item.entries.items() if dtype == "float16"]
    checked = [key for key in narrow if key in item.keys(Factor)]
    if item.setting.handling.on_nonfinite != "propagate":
        checked += ["p", *narrow]
    for _ in checked:
        yield [figures_of(item, "max", item.tensor.shape, None)]


def held_shape(item: Item, value: Value) -> Shape:
    """The shape of what a rank has of a value: 1 along axes along which it does not vary."""
    return tuple(size if axis in (value.extent or ()) else 1 for axis, size in enumerate(item.tensor.shape))


def figures_of(item: Item, kind: str, shape: Shape, axes: Axes) -> Figures:
    """What is left of something of this shape that is reduced along some axes."""
    gone = range(len(shape)) if axes is None else {axis % len(shape) for axis in axes if shape}
    numbers = math.prod(size for axis, size in enumerate(shape) if axis not in gone)
    return Figures(kind, numbers, arithmetic(item.tensor.dtype), item.across(axes))


def messages(items: Sequence[Item]) -> dict[tuple[int, str, str], int]:
    """Bytes of every message of a step, by round, kind and mesh dimension."""
    asked: list[tuple[int, Figures]] = []
    for item in items:
        handling = item.setting.handling
        if handling.needs_norm or handling.may_skip:
            # squares of all gradients, before anything else
            asked.append((0, Figures("sum", 1, arithmetic(item.tensor.dtype), item.across(None))))
        passed: Counter[str] = Counter()  # sums are asked for together, and so are maxima
        by_kernels = item.by_kernels and not item.rule.needs_whole
        for told in rounds_of(item):
            kind = "sum" if by_kernels else told[0].kind  # kernels for GPUs have nothing but sums
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


def kernel_peak(items: Sequence[Item], sums: Iterable[int]) -> int:
    """Bytes at the peak where kernels for GPUs step parts in place: what they keep, and the largest message."""
    buckets = sort_items(items, lambda item: (item.kind, item.cuts and (item.cuts, len(item.shape))))
    return gpu_scratch(buckets) + max([joint_bytes(buckets), *map(aligned, sums)])


# ---- owners


def whole_rule(item: Item) -> WholeRule:
    assert isinstance(item.rule, WholeRule)
    return item.rule


def choose_owners(items: Sequence[Item], place: Place, rank: int) -> list[Item]:
    """Items with the kernels that serve them, and the owners of those that have to be seen whole.

    An owner is one of all ranks, or else one in this rank's replica.
    What has no axes every rank has, and none owns.
    """
    found, here = [find_kernels(item, place) for item in items], rank - rank % place.shards
    teams: dict[tuple[int, tuple[str, ...]], list[int]] = {}
    for index, item in enumerate(items):
        if item.rule.needs_whole and item.shape and (item.is_sharded or place.shards == 1):
            teams.setdefault((place.replicas if is_divided(item, place) else 1, item.team), []).append(index)
    for (replicas, _), members in teams.items():
        shards = items[members[0]].shards
        # what tensor parallelism does not divide is owned among the ranks that have the same part of the rest
        step, among = (1, 0) if shards == place.shards else (place.shards // shards, rank % (place.shards // shards))
        loads = no_loads(shards, replicas)
        for parted in (True, False):  # kernels ask before lists do
            own = [i for i in members if found[i].parted is parted]
            costs = [(found[i].tensor.name, whole_rule(found[i]).cost(found[i].shape)) for i in own]
            for i, (replica, owner) in zip(own, owners_of(costs, loads), strict=True):
                first = replica * place.shards if replicas > 1 else here
                found[i] = replace(found[i], owner=first + owner * step + among, replicas=replicas)
    return found


def is_divided(item: Item, place: Place) -> bool:
    """Whether replicas divide the work on a tensor, as a run does unless it is told otherwise."""
    if place.replicas == 1 or place.engine == "fused":
        return False
    on_gpu = place.device == "cuda" and place.engine == "auto" and not item.is_sharded
    if on_gpu and kernels.would_lose_kernels(item.setting, item.shape, item.tensor.dtype):
        return False
    return is_worth_sending(whole_rule(item), item.shape, arithmetic(item.tensor.dtype), place.device)


def entries_held(item: Item) -> dict[str, Kept]:
    """What a rank keeps of a parameter's state: momentum like the parameter, and rows of every factor."""
    entries = item.entries
    for key in item.keys(Factor) if item.is_sharded else ():
        shape, dtype = entries[key]
        rows = shape[0]
        for cut in reversed(item.cuts):
            rows = shard(rows, cut.ranks, cut.seat)
        entries[key] = (rows, *shape[1:]), dtype
    return entries


def counts(item: Item, role: type[Entry]) -> dict[str, int]:
    """The elements of each whole entry of a role."""
    entries = item.entries
    return {key: math.prod(entries[key][0]) for key in item.keys(role)}


def factor_bytes(item: Item) -> int:
    """Bytes of the factors that an owner puts together, in the precision of the arithmetic."""
    return BYTES[arithmetic(item.tensor.dtype)] * sum(counts(item, Factor).values())


def bytes_of_owner(item: Item) -> int:
    """Bytes of whole factors between steps. Kernels write them in place, as they are stored, and their norms too."""
    if not item.by_kernels:
        return factor_bytes(item) if item.remembers else 0
    return sum(entry_bytes(item.entries[key]) for key in item.keys(PerSlice))


def rows_of_factors(item: Item) -> int:
    """The elements of a parameter's factors that a rank keeps."""
    entries = entries_held(item)
    return sum(math.prod(entries[key][0]) for key in item.keys(Factor))


def word(items: Sequence[Item]) -> int:
    """Bytes of a number in a message: all of it is in the widest dtype of what is shown of its tensors."""
    return BYTES[widest(whole_rule(item).whole_dtype(arithmetic(item.tensor.dtype)) for item in items)]


class Traffic(NamedTuple):
    """Bytes that a rank sends to others in a step, and receives from them."""

    sent: int
    received: int


def teams_of(items: Iterable[Item]) -> list[list[Item]]:
    """Tensors that travel together: those of one engine."""
    owned = (item for item in items if item.owner is not None)
    return sort_items(owned, lambda item: (item.replicas, item.team, item.parted))


def is_owned_here(item: Item, world: int, rank: int) -> bool:
    """Whether the owner is in the rank's replica."""
    return item.owner is not None and item.owner // world == rank // world


def collectives_of(items: Sequence[Item], world: int, rank: int) -> int:
    """Messages of one team in a step: for each slot to owners and back, if this replica has any, then to replicas."""
    own = [any(is_owned_here(item, world, rank) for item in slot) for slot in in_slots(items)]
    return 2 * sum(own) * items[0].is_sharded + len(own) * (items[0].replicas > 1)


def in_slots(items: Sequence[Item]) -> list[list[Item]]:
    """Tensors of one team that travel together."""
    most = SLOT if items[0].is_sharded else SLOT // items[0].replicas
    slots = slots_of([(item.owner, math.prod(item.shape)) for item in items], most)
    return [[items[i] for i in members] for members in slots]


def traffic_of(items: Sequence[Item], world: int, rank: int, *, refresh: bool) -> Traffic:
    """Of one team in a step; a refresh sends every rank its rows of the factors. world: ranks of a replica."""
    sent, received, size = 0, 0, word(items)
    for item in items:
        rule, rows, factors = whole_rule(item), rows_of_factors(item), sum(counts(item, Factor).values())
        here, whole = item.tensor.elements, math.prod(item.shape)
        # for every rank alike
        figures = len(rule.FIGURES) * math.prod(rule.figure_shape(item.shape)) * (2 if size == 2 else 1)
        shown, all_shown = rule.whole_tensors() * here, rule.whole_tensors() * whole
        if not item.remembers:
            shown, all_shown = shown + rows, all_shown + factors
        if refresh or rule.learns_always:
            figures += sum(counts(item, PerSlice).values()) - factors
            here, whole = here + rows, whole + factors
        is_here = is_owned_here(item, world, rank)
        if item.owner == rank:
            sent += whole - here + (item.shards - 1) * figures
            received += all_shown - shown
        elif is_here:
            sent += shown
            received += here + figures
        if is_here:
            sent += (item.replicas - 1) * (here + figures)
        else:
            received += here + figures
    return Traffic(sent * size, received * size)


class Stages(NamedTuple):
    """Bytes at the peak of each stage of a slot, and of what is left of it for this rank."""

    arriving: int
    working: int
    returning: int
    telling: int
    made: int


def owner_peak(items: Sequence[Item], world: int, rank: int) -> tuple[int, int]:
    """Bytes at the peak of a step that refreshes, and of them those of slots that arrive and leave.

    Of several slots, those one after the other have stages together. A step that is recorded keeps all of it.
    """
    on_parts = {
        id(i): footprint(i.setting, i.tensor.shape, i.tensor.dtype, whole=i.shape, by_owners=True)
        for i in items
        if not i.parted
    }
    slots, turns, sent, shown, made = [], [0], [0], 0, 0
    for team in teams_of(items):
        own = [(slot, stages_of(slot, world, rank)) for slot in in_slots(team)]
        if team[0].parted:  # kernels write parts where they are, and keep what they show of the largest slot
            shown += max(sum(word([item]) * item.tensor.elements for item in slot) for slot, _ in own)
        if team[0].is_sharded or team[0].setting.handling.on_nonfinite == "raise":
            slots += [stages for _, stages in own]
            made += 0 if team[0].parted else sum(stages.made for _, stages in own)
            continue
        # whole tensors are stepped slot by slot: while one is transformed, the one before is sent and written
        needs = [0]
        for slot, stages in own:
            parts = [on_parts.pop(id(item)) for item in slot if not item.parted]
            needs.append(max(sum(part.waiting for part in parts) + max(stages), sum(part.peak for part in parts)))
        turns += map(sum, itertools.pairwise(needs))
        sent += map(sum, itertools.pairwise([0, *(stages.telling for _, stages in own)]))
    waiting, after = (sum(getattr(own, what) for own in on_parts.values()) for what in ("waiting", "peak"))
    if len(slots) > 1:
        *by_stage, _ = zip(*slots, strict=True)
        waiting += sum(map(max, by_stage)) + made
    elif slots:
        waiting += max(slots[0])
    launched = [item for item in items if item.by_kernels and item.owner == rank]
    everyone = [item for item in items if item.by_kernels and item.owner is None]
    # an owner has kernels for its tensors, in addition to those for tensors that every rank has whole
    scratch = sum(gpu_scratch(bare_buckets(some)) for some in (launched, everyone))
    on_their_way = [max(own.arriving for own in slots), max(own.returning for own in slots)] if slots else [0]
    sent.append(sum(on_their_way) if len(slots) > 1 else max(on_their_way))
    return max(waiting, after, *turns) + shown + scratch, max(sent)


def stages_of(items: Sequence[Item], world: int, rank: int) -> Stages:
    """Of tensors that travel together; a message is there twice while it is put together."""
    size, seen = word(items), max(whole_rule(item).whole_tensors() for item in items)
    mine = [item for item in items if item.owner == rank]
    launched, in_lists = ([i.whole_item() for i in mine if i.by_kernels is chosen] for chosen in (True, False))
    given = size * sum(item.tensor.elements for item in items)
    for_kernels, others = (size * sum(i.tensor.elements for i in some) for some in (launched, in_lists))
    whole, factors = for_kernels + others, sum(map(factor_bytes, mine))
    rows = size * sum(map(rows_of_factors, items))
    divided = items[0].is_sharded
    going, came = (seen * given, seen * whole) if divided else (0, 0)
    if divided and not all(item.remembers for item in items):
        going, came = going + rows, came + factors
    fresh = sum(factor_bytes(item) for item in in_lists if is_made_anew(item))
    # what there are kernels for is put together first; the rest one after the other, from what came to what goes back
    stacks, single = ([i for i in in_lists if whole_rule(i).is_stackable(i.shape) is ok] for ok in (True, False))
    working = came + seen * for_kernels + fresh + others
    working += max((work_peak(item) for item in single), default=0)
    # stacks are made when all is put together
    working = max(working, came + (came if divided else 0), seen * whole + whole + stack_peak(stacks))
    returning = whole + fresh + 2 * (whole + factors) + given + rows
    copied = [item for item in items if item.replicas > 1 and is_owned_here(item, world, rank)]
    pieces = ((item.replicas + 1) * (item.tensor.elements + rows_of_factors(item)) for item in copied)
    telling = given + rows + size * sum(pieces)
    return Stages(2 * going + came, working, returning, telling, given + rows)


def is_made_anew(item: Item) -> bool:
    """Whether refreshed factors on their way are beside those that their owner keeps: if it keeps none, or rounded."""
    entries, precision = item.entries, arithmetic(item.tensor.dtype)
    return not item.remembers or any(entries[key][1] != precision for key in item.keys(Factor))


def without_momentum(item: Item) -> Item:
    """As owners have it: they whiten, and each rank averages its own part."""
    assert isinstance(item.setting.rule, Kron)
    return replace(item, setting=replace(item.setting, rule=replace(item.setting.rule, momentum=0.0)))


def bare_buckets(items: Sequence[Item]) -> list[list[Item]]:
    """Whole tensors as kernels whiten them: those of one shape together, in float32."""
    whole = [item.whole_item() for item in items]
    bare = [without_momentum(replace(item, tensor=replace(item.tensor, dtype="float32"))) for item in whole]
    return sort_items(bare, lambda item: (item.setting, item.shape))


def work_peak(item: Item) -> int:
    """What an owner needs for one tensor, which it first puts together."""
    rule = whole_rule(item)
    put_together = rule.whole_tensors() * word([item]) * item.tensor.elements
    if not item.remembers:
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
        found = max(found, count * middle_peak(whole_rule(first), first.shape, arithmetic(first.tensor.dtype)))
    return found
