"""What one rank has and does: all of it under ddp, a part of each parameter under fsdp2.

State lies as its parameter does: statistics of rows with their rows, those of columns on every rank. Kron's factors
are stored in parts beside a whole copy at the rank that owns the parameter and does its products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from thalweg.kernels.staging import SLOTS, staged, together
from thalweg.plan import costs
from thalweg.plan.items import Item, entry_bytes, item_of, local, shard, sort_items
from thalweg.plan.memory import Peak, numpy_peak, parts_peak, torch_peak
from thalweg.plan.models import Tensor
from thalweg.plan.ranks import (
    exchanged_bytes,
    is_launched,
    kept_by_owner,
    kept_entries,
    kernel_peak,
    messages,
    owner_peak,
    owners,
    ring,
    whole_of,
)
from thalweg.settings import Setting
from thalweg.storage import keys_like_parameter


@dataclass(frozen=True)
class Share:
    """What one rank keeps, needs in a step, moves and sends."""

    rank: int
    parameter_bytes: int
    state_bytes: int
    #: None where the compiler decides.
    peak_bytes: int | None
    #: Whether the peak is a bound: a step may need less.
    peak_is_bound: bool
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

    @property
    def is_divided(self) -> bool:
        """Whether each rank has a part of every parameter."""
        return self.world > 1 and self.layout == "fsdp2"


def largest_share(
    settings: Sequence[Setting], tensors: Sequence[Tensor], place: Place, frozen: Sequence[Tensor] = ()
) -> Share:
    """The share of the rank that needs most. settings: of each tensor. frozen: weights that are not trained."""
    whole = [item_of(tensor, own) for tensor, own in zip(tensors, settings, strict=True) if own.rule.needs_whole]
    ranks = [0]  # no other has more
    if place.is_divided and whole:
        owned = owners(whole, place.world)
        # ranks that hold and own alike need the same
        lengths = {tensor.shape[0] for tensor in (*tensors, *frozen) if tensor.shape}
        unlike: dict[Any, int] = {}
        for rank in range(place.world):
            held = tuple(shard(length, place.world, rank) for length in lengths)
            mine = sorted(item.shape for item, owner in zip(whole, owned, strict=True) if owner == rank)
            unlike.setdefault((held, tuple(mine)), rank)
        ranks = list(unlike.values())
    shares = [share_of(settings, tensors, place, rank) for rank in ranks]
    most = [with_frozen(share, frozen, place) for share in shares]
    return max(most, key=lambda share: share.total_bytes)


def with_frozen(share: Share, frozen: Sequence[Tensor], place: Place) -> Share:
    """A rank's share with its part of the weights that are not trained: they lie as parameters do."""
    held = [local(tensor, place.world, share.rank) for tensor in frozen] if place.is_divided else frozen
    return replace(share, frozen_bytes=costs.frozen_bytes(held))


def share_of(settings: Sequence[Setting], tensors: Sequence[Tensor], place: Place, rank: int) -> Share:
    """The share of one rank. settings: of each tensor."""
    world = place.world if place.is_divided else 1
    items = [item_of(tensor, own, world, rank) for tensor, own in zip(tensors, settings, strict=True)]
    whole = [item for item in items if item.rule.needs_whole] if world > 1 else []
    owned = owners(whole, world)
    by_kernels = [world > 1 and is_launched(item, place.device, place.engine) for item in items]
    launched = {item.tensor.name for item, own in zip(items, by_kernels, strict=True) if own}
    # lists and owners have messages of their own; kernels have nothing but sums
    as_sums = [own and not item.rule.needs_whole for item, own in zip(items, by_kernels, strict=True)]
    sums = messages(items, as_sums) if world > 1 else {}
    peak = peak_of(items, place) if world == 1 else peak_of_parts(items, whole, owned, by_kernels, sums, place, rank)
    mine = [whole_of(item) for item, owner in zip(whole, owned, strict=True) if owner in (rank, None)]
    kept = [entry for item in items for entry in (kept_entries(item, world, rank) if whole else item.entries).values()]
    state = costs.counter_bytes(place.front_end, len(items), items[0].setting) + sum(map(entry_bytes, kept))
    for item, owner in zip(whole, owned, strict=True):
        if owner == rank:
            state += kept_by_owner(item, by_kernels=item.tensor.name in launched)
    hosted = sizes_on_host(items) if place.offload_state and not whole else []
    elsewhere = {id(item) for item in whole}

    def moved(refresh: bool) -> int:
        here = sum(costs.moved_by(item, refresh=refresh) for item in items if id(item) not in elsewhere)
        products = sum(costs.moved_by_products(item, refresh=refresh) for item in mine)
        return here + products + sum(costs.moved_by_applying(item) for item in whole)

    def sent(refresh: bool) -> int:
        exchanged = exchanged_bytes(whole, owned, world, rank, refresh=refresh) if whole else 0
        return ring(sum(sums.values()), world) + exchanged

    def products(refresh: bool) -> int:
        return sum(costs.flops(item, refresh=refresh) for item in (mine if whole else items))

    return Share(
        rank=rank,
        parameter_bytes=sum(costs.parameter_bytes(item.tensor) for item in items),
        state_bytes=state,
        peak_bytes=None if peak.bytes is None else peak.bytes + room_for(hosted),
        peak_is_bound=peak.is_bound,
        host_bytes=sum(hosted),
        moved_bytes=moved(True),
        moved_between=moved(False),
        sent_bytes=sent(True),
        sent_between=sent(False),
        collectives=len(sums) + (2 if whole else 0),
        flops=products(True),
        flops_between=products(False),
        engine=peak.engine,
    )


def peak_of(items: Sequence[Item], place: Place) -> Peak:
    if place.front_end == "optax":
        return Peak(None, "XLA")
    if place.front_end == "numpy":
        return numpy_peak(items, engine=place.engine)
    return torch_peak(items, engine=place.engine, device=place.device)


def peak_of_parts(
    items: Sequence[Item],
    whole: Sequence[Item],
    owned: Sequence[int | None],
    by_kernels: Sequence[bool],
    sums: dict[Any, int],
    place: Place,
    rank: int,
) -> Peak:
    """Where every rank has a part of each parameter, and owners work on whole ones."""
    parts = [(item, own) for item, own in zip(items, by_kernels, strict=True) if not item.rule.needs_whole]
    launched, listed = ([item for item, own in parts if own is chosen] for chosen in (True, False))
    engines = {"fused" if own else "foreach" for own in by_kernels}
    peak, is_bound = 0, False
    if launched:
        peak += kernel_peak(launched, list(sums.values()))
    if listed and place.engine == "fused" and place.device == "cpu":
        return peak_of(listed, place)  # native code steps parts only where it is asked for
    if listed:
        peak, is_bound = peak + parts_peak(listed), True
    if whole:
        own = [own for item, own in zip(items, by_kernels, strict=True) if item.rule.needs_whole]
        peak, is_bound = peak + owner_peak(whole, owned, own, place.world, rank), True
    return Peak(peak, " + ".join(sorted(engines)), is_bound)


def sizes_on_host(items: Sequence[Item]) -> list[int]:
    """Bytes of state in the host's memory, of parameters that are moved together."""
    sizes = []
    for bucket in sort_items(items, lambda item: item.kind):
        for unit in together(bucket[0].rule, bucket[0].shape, [item.tensor.elements for item in bucket]):
            sizes.append(sum(bytes_on_host(bucket[i]) for i in unit))
    return sizes


def bytes_on_host(item: Item) -> int:
    """Of the state of a parameter, if what is as large as the parameter is in the host's memory."""
    entries = item.entries
    return sum(entry_bytes(entries[key]) for key in keys_like_parameter(item.rule, item.shape, entries))


def room_for(sizes: Sequence[int]) -> int:
    """What state of these bytes takes of the device while it passes."""
    slots = [0] * SLOTS
    for members, slot in staged(sizes):
        slots[slot] = max(slots[slot], sum(sizes[i] for i in members))
    return sum(slots)
