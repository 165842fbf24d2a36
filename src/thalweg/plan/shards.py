"""What one rank has and does: all of it under ddp, a part of each parameter under fsdp2.

State lies as its parameter does: statistics of rows with their rows, those of columns on every rank. Kron's factors
are stored in parts beside a whole copy at the rank that owns the parameter and does its products.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from thalweg.arrays import Shape
from thalweg.kernels.cpu import served as native
from thalweg.kernels.staging import SLOTS, staged, together
from thalweg.kernels.triton import served as kernels
from thalweg.plan import costs
from thalweg.plan.items import Item, entry_bytes
from thalweg.plan.models import Tensor
from thalweg.plan.owners import exchanged_bytes, kept_by_owner, kept_entries, owner_peak, owners
from thalweg.plan.parts import Part, divided_peak, kernel_peak, messages
from thalweg.plan.peaks import numpy_peak, torch_peak, torch_unserved
from thalweg.settings import Setting
from thalweg.storage import keys_like_parameter, kind

#: The axes along which FSDP2 shards parameters.
DIVIDED = (0,)


@dataclass(frozen=True)
class Share:
    """What one rank keeps, needs in a step, moves and sends."""

    rank: int
    parameter_bytes: int
    state_bytes: int
    #: None where the compiler decides.
    peak_bytes: int | None
    moved_bytes: int
    sent_bytes: int
    #: Messages to other ranks, each of them one collective.
    collectives: int
    flops: int
    #: The same for a step in which Kron does not refresh its factors.
    moved_between: int
    sent_between: int
    flops_between: int
    engine: str
    #: Of weights that are not trained.
    frozen_bytes: int = 0
    #: Of the state, what is in the host's memory.
    host_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Parameters, gradients, frozen weights, state that is not on the host, and what a step needs besides."""
        state = self.state_bytes - self.host_bytes
        return 2 * self.parameter_bytes + self.frozen_bytes + state + (self.peak_bytes or 0)


@dataclass(frozen=True)
class Place:
    """Where steps are taken, and by what."""

    front_end: str
    device: str
    engine: str
    world: int
    layout: str
    #: Whether state is in the host's memory.
    offload_state: bool = False


def largest_share(setting: Setting, tensors: Sequence[Tensor], place: Place, frozen: Sequence[Tensor] = ()) -> Share:
    """The share of the rank that needs most. ``frozen``: weights that lie beside those that are trained."""
    if not is_divided(place) or not setting.rule.needs_whole:
        return with_frozen(share_of(setting, tensors, place, 0), frozen, place)  # no other has more
    owned = owners(setting, tensors, place.world)
    # ranks that hold and own alike need the same
    lengths = {tensor.shape[0] for tensor in (*tensors, *frozen) if tensor.shape}
    shapes: dict[int | None, list[Shape]] = defaultdict(list)
    for tensor, owner in zip(tensors, owned, strict=True):
        shapes[owner].append(tensor.shape)
    unlike: dict[Any, int] = {}
    for rank in range(place.world):
        held = tuple(costs.shard(length, place.world, rank) for length in lengths)
        unlike.setdefault((held, tuple(sorted(shapes[rank]))), rank)
    shares = (owner_share(setting, tensors, place, owned, rank) for rank in unlike.values())
    return max((with_frozen(share, frozen, place) for share in shares), key=lambda share: share.total_bytes)


def with_frozen(share: Share, frozen: Sequence[Tensor], place: Place) -> Share:
    """A rank's share with its part of the weights that are not trained: they lie as parameters do."""
    held = [costs.local(tensor, place.world, share.rank) for tensor in frozen] if is_divided(place) else frozen
    return replace(share, frozen_bytes=costs.frozen_bytes(held))


def share_of(setting: Setting, tensors: Sequence[Tensor], place: Place, rank: int) -> Share:
    """The share of one rank."""
    if not is_divided(place):
        return whole_share(setting, tensors, place, rank)
    if setting.rule.needs_whole:
        return owner_share(setting, tensors, place, owners(setting, tensors, place.world), rank)
    return part_share(setting, tensors, place, rank)


def is_divided(place: Place) -> bool:
    return place.world > 1 and place.layout == "fsdp2"


def reason_against_part(setting: Setting, whole: Tensor, device: str) -> str:
    """Why native code, or a kernel on a GPU, cannot step a part of a parameter, "" if it can."""
    if device == "cuda":
        return kernels.reason_against_shard(setting, whole.shape, DIVIDED)
    return native.reason_against_shard(setting, whole.shape, DIVIDED)


def whole_share(setting: Setting, tensors: Sequence[Tensor], place: Place, rank: int) -> Share:
    """Everything, as every rank has it."""
    items = [Item(tensor, setting.for_shape(tensor.shape)) for tensor in tensors]
    return of_items(items, place, rank, peak_of(items, place))


def part_share(setting: Setting, tensors: Sequence[Tensor], place: Place, rank: int) -> Share:
    """A part of every parameter."""
    parts = [part_of(tensor, place.world, rank) for tensor in tensors]
    items = [Item(part.held, setting.for_shape(part.whole.shape), part.whole.shape) for part in parts]
    by_kernels = [is_launched(setting, part, place) for part in parts]
    sums = messages(setting, parts, by_kernels)
    sent = costs.ring(sum(sums.values()), place.world)
    peak: tuple[int | None, str]
    if any(by_kernels):
        lists = [item for item, own in zip(items, by_kernels, strict=True) if not own]
        launched = [part for part, own in zip(parts, by_kernels, strict=True) if own]
        peak = beside_lists(kernel_peak(setting, launched, sums.values()), lists)
    else:
        # native code steps parts only where it is asked for
        peak = peak_of(items, place) if place.engine == "fused" else divided_peak(items)
    bare = of_items(items, place, rank, peak)
    return replace(bare, sent_bytes=sent, sent_between=sent, collectives=len(sums))


def is_launched(setting: Setting, part: Part, place: Place) -> bool:
    """Whether kernels for GPUs step a part, or whiten the whole for its owner."""
    if place.device != "cuda" or place.engine not in ("auto", "fused"):
        return False
    whole = Item(part.whole, setting)
    return not (torch_unserved(whole, place.device) or reason_against_part(setting, part.whole, place.device))


def beside_lists(launched: int, lists: Sequence[Item]) -> tuple[int, str]:
    """The peak of kernels for GPUs, and of what is stepped as lists beside them."""
    if not lists:
        return launched, "fused"
    peak, engine = divided_peak(lists)
    return launched + peak, f"{engine} + fused"


def part_of(tensor: Tensor, world: int, rank: int) -> Part:
    """A rank's part of the first axis of a parameter; tensors without axes are everywhere."""
    divided = [("ranks",), *((),) * (len(tensor.shape) - 1)] if tensor.shape else []
    return Part(tensor, costs.local(tensor, world, rank), tuple(divided))


def of_items(items: Sequence[Item], place: Place, rank: int, peak: tuple[int | None, str]) -> Share:
    """A share of parameters that are stepped where they are, and nothing sent."""
    counters = costs.counter_bytes(place.front_end, len(items), items[0].setting)
    entries = [entry for item in items for entry in item.entries.values()]
    hosted = sizes_on_host(items) if place.offload_state else []
    return Share(
        rank=rank,
        parameter_bytes=sum(costs.parameter_bytes(item.tensor) for item in items),
        state_bytes=counters + sum(map(entry_bytes, entries)),
        peak_bytes=None if peak[0] is None else peak[0] + room_for(hosted),
        host_bytes=sum(hosted),
        moved_bytes=sum(costs.bytes_moved(item.setting, item.tensor, whole=item.whole) for item in items),
        moved_between=sum(
            costs.bytes_moved(item.setting, item.tensor, whole=item.whole, refresh=False) for item in items
        ),
        sent_bytes=0,
        sent_between=0,
        collectives=0,
        flops=sum(costs.flops(item.setting, item.tensor) for item in items),
        flops_between=sum(costs.flops(item.setting, item.tensor, refresh=False) for item in items),
        engine=peak[1],
    )


def sizes_on_host(items: Sequence[Item]) -> list[int]:
    """Bytes of state in the host's memory, of parameters that are moved together."""
    buckets: dict[Any, list[Item]] = defaultdict(list)
    for item in items:
        shape = item.whole or item.tensor.shape
        alike = kind(item.setting.rule_at(1), item.setting.handling, shape)
        buckets[item.setting, item.tensor.dtype, alike].append(item)
    sizes = []
    for bucket in buckets.values():
        rule, shape = bucket[0].setting.rule_at(1), bucket[0].whole or bucket[0].tensor.shape
        for unit in together(rule, shape, [item.tensor.elements for item in bucket]):
            sizes.append(sum(bytes_on_host(bucket[i]) for i in unit))
    return sizes


def bytes_on_host(item: Item) -> int:
    """Of the state of a parameter, if what is as large as the parameter is in the host's memory."""
    entries = item.entries
    keys = keys_like_parameter(item.setting.rule_at(1), item.whole or item.tensor.shape, entries)
    return sum(entry_bytes(entries[key]) for key in keys)


def room_for(sizes: Sequence[int]) -> int:
    """What state of these bytes takes of the device while it passes."""
    slots = [0] * SLOTS
    for members, slot in staged(sizes):
        slots[slot] = max(slots[slot], sum(sizes[i] for i in members))
    return sum(slots)


def owner_share(
    setting: Setting, tensors: Sequence[Tensor], place: Place, owned: Sequence[int | None], rank: int
) -> Share:
    """A part of every parameter, and the products of those that this rank owns, or that everyone has as a whole."""
    world = place.world
    parts = [part_of(tensor, world, rank) for tensor in tensors]
    mine = [tensor for tensor, owner in zip(tensors, owned, strict=True) if owner in (rank, None)]
    entries = [entry for part in parts for entry in kept_entries(setting, part, world, rank).values()]
    by_kernels = [is_launched(setting, part, place) for part in parts]
    state = costs.counter_bytes(place.front_end, len(tensors), setting) + sum(map(entry_bytes, entries))
    state += sum(
        kept_by_owner(setting, tensor, by_kernels=own)
        for tensor, owner, own in zip(tensors, owned, by_kernels, strict=True)
        if owner == rank
    )
    peak, engine = owner_peak(setting, parts, owned, by_kernels, world, rank)
    sums = messages(setting, parts)

    def moved(refresh: bool) -> int:
        products = sum(costs.moved_by_products(setting, tensor, refresh=refresh) for tensor in mine)
        return products + sum(costs.moved_by_applying(setting, part.held) for part in parts)

    def sent(refresh: bool) -> int:
        summed = costs.ring(sum(sums.values()), world)
        return summed + exchanged_bytes(setting, parts, owned, world, rank, refresh=refresh)

    return Share(
        rank=rank,
        parameter_bytes=sum(costs.parameter_bytes(part.held) for part in parts),
        state_bytes=state,
        peak_bytes=peak,
        moved_bytes=moved(True),
        moved_between=moved(False),
        sent_bytes=sent(True),
        sent_between=sent(False),
        collectives=2 + len(sums),
        flops=sum(costs.flops(setting, tensor) for tensor in mine),
        flops_between=sum(costs.flops(setting, tensor, refresh=False) for tensor in mine),
        engine=engine,
    )


def peak_of(items: Sequence[Item], place: Place) -> tuple[int | None, str]:
    if place.front_end == "optax":
        return None, "XLA"
    if place.front_end == "numpy":
        return numpy_peak(items, engine=place.engine)
    return torch_peak(items, engine=place.engine, device=place.device)
