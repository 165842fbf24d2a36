"""What one rank has and does: all of it under ddp, a part of each parameter under fsdp2 and hsdp.

State lies as its parameter does: statistics of rows with their rows, those of columns on every rank. Kron's factors
are stored in parts beside a whole copy at the rank that owns the parameter and does its products.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from thalweg.arrays import Shape
from thalweg.plan import costs
from thalweg.plan.items import Item, Place, cuts_of, item_of, local
from thalweg.plan.memory import Peak, measure_item, numpy_peak, torch_peak
from thalweg.plan.models import Tensor
from thalweg.plan.ranks import (
    Traffic,
    bytes_of_owner,
    choose_owners,
    collectives_of,
    entries_held,
    kernel_peak,
    messages,
    owner_peak,
    ring,
    teams_of,
    traffic_of,
)
from thalweg.programs.budget import entry_bytes
from thalweg.settings import Setting


@dataclass(frozen=True)
class Share:
    """What one rank keeps, needs in a step, moves and sends."""

    engine: str
    rank: int
    parameter_bytes: int
    state_bytes: int
    #: None where the compiler decides.
    peak_bytes: int | None
    #: Whether the peak is a bound: a step may need less.
    peak_is_bound: bool
    moved_bytes: int
    #: The same for a step in which Kron does not refresh its factors; and so below.
    moved_bytes_without_refresh: int
    product_flops: int
    product_flops_without_refresh: int
    sent_bytes: int
    sent_bytes_without_refresh: int
    received_bytes: int
    received_bytes_without_refresh: int
    #: Messages to other ranks, each of them one collective.
    collectives: int
    #: Of the peak, messages between owners and other ranks.
    slot_bytes: int = 0
    #: Tensors on which replicas divide the work.
    divided_tensors: int = 0
    #: Of weights that are not trained.
    frozen_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Parameters, gradients, frozen weights, state, and what a step needs besides."""
        return 2 * self.parameter_bytes + self.frozen_bytes + self.state_bytes + (self.peak_bytes or 0)


def unlike_shares(
    settings: Sequence[Setting], tensors: Sequence[Tensor], place: Place, frozen: Sequence[Tensor] = ()
) -> list[Share]:
    """The shares of ranks, of those that hold and own alike only the first one's."""
    ranks = [0]  # no other has more
    if any(setting.rule.needs_whole for setting in settings):
        owned: dict[int, list[Shape]] = defaultdict(list)
        held = [item_of(*both, place) for both in zip(tensors, settings, strict=True)]
        items = choose_owners(held, place, 0)
        for item in items:
            for first in range(0, place.world, place.shards) if item.replicas == 1 else (0,):
                # what tensor parallelism does not divide has owners of its own in each part
                for part in range(place.shards // item.shards if item.is_sharded else 1):
                    if item.owner is not None:
                        owned[first + item.owner + part].append(item.shape)
        alike = {(tensor.shape, cuts_of(tensor, place)): tensor for tensor in (*tensors, *frozen)}
        unlike: dict[Any, int] = {}
        # replicas that divide nothing are alike
        for rank in range(place.world if any(item.replicas > 1 for item in items) else place.shards):
            sizes = tuple(local(tensor, place, rank).shape for tensor in alike.values())
            unlike.setdefault((sizes, tuple(sorted(owned.get(rank, ())))), rank)
        ranks = list(unlike.values())
    return [share_of(settings, tensors, place, rank, frozen) for rank in ranks]


def share_of(
    settings: Sequence[Setting], tensors: Sequence[Tensor], place: Place, rank: int, frozen: Sequence[Tensor] = ()
) -> Share:
    """The share of one rank. settings: of each tensor."""
    world = place.shards
    items = [item_of(tensor, own, place, rank) for tensor, own in zip(tensors, settings, strict=True)]
    items = [
        item if world > 1 or item.replicas > 1 else replace(item, owner=None)
        for item in choose_owners(items, place, rank)
    ]
    are_whole = [item.rule.needs_whole and (item.owner is not None or (world > 1 and not item.shape)) for item in items]
    whole, elementwise = ([i for i, own in zip(items, are_whole, strict=True) if own is ok] for ok in (True, False))
    mine = [item.whole_item() for item in whole if item.owner in (rank, None)]
    sums = messages(items) if world > 1 else {}
    peak = peak_of_parts(elementwise, whole, sums, place, rank) if whole or world > 1 else peak_of(items, place)
    state = costs.counter_bytes(place.front_end, len(items), items[0].setting)
    state += sum(entry_bytes(entry) for item in items for entry in entries_held(item).values())
    state += sum(bytes_of_owner(item) for item in whole if item.owner == rank)
    not_trained = [local(tensor, place, rank) for tensor in frozen]

    by_dimension: Counter[str] = Counter()
    for (_, _, name), size in sums.items():
        by_dimension[name] += size

    def moved(refresh: bool) -> int:
        here = sum(costs.bytes_moved_by(item, refresh=refresh) for item in elementwise)
        products = sum(costs.bytes_moved_by_products(item, refresh=refresh) for item in mine)
        return here + products + sum(costs.bytes_moved_by_applying(item) for item in whole)

    def traffic(refresh: bool) -> Traffic:
        by_sums, teams = sum(ring(own, place.sizes[name]) for name, own in by_dimension.items()), teams_of(whole)
        found = [Traffic(by_sums, by_sums), *(traffic_of(team, world, rank, refresh=refresh) for team in teams)]
        return Traffic(*map(sum, zip(*found, strict=True)))

    def products(refresh: bool) -> int:
        return sum(costs.flops(item, refresh=refresh) for item in (*mine, *elementwise))

    refreshing, between = traffic(True), traffic(False)
    return Share(
        engine=peak.engine,
        rank=rank,
        parameter_bytes=sum(costs.parameter_bytes(item.tensor) for item in items),
        state_bytes=state,
        peak_bytes=peak.bytes,
        peak_is_bound=peak.is_bound,
        moved_bytes=moved(True),
        moved_bytes_without_refresh=moved(False),
        product_flops=products(True),
        product_flops_without_refresh=products(False),
        sent_bytes=refreshing.sent,
        sent_bytes_without_refresh=between.sent,
        received_bytes=refreshing.received,
        received_bytes_without_refresh=between.received,
        collectives=len(sums) + sum(collectives_of(team, world, rank) for team in teams_of(whole)),
        slot_bytes=peak.slots,
        divided_tensors=sum(item.replicas > 1 for item in whole),
        frozen_bytes=sum(map(costs.parameter_bytes, not_trained)),
    )


def peak_of(items: Sequence[Item], place: Place) -> Peak:
    if place.front_end == "optax":
        return Peak(None, "XLA")
    if place.front_end == "numpy":
        return numpy_peak(items, engine=place.engine)
    return torch_peak(items, engine=place.engine, device=place.device)


def peak_of_parts(
    elementwise: Sequence[Item], whole: Sequence[Item], sums: Mapping[Any, int], place: Place, rank: int
) -> Peak:
    """Where every rank has a part of each parameter, and owners work on whole ones."""
    launched, in_lists = ([item for item in elementwise if item.by_kernels is chosen] for chosen in (True, False))
    if in_lists and place.engine == "fused" and place.device == "cpu":
        return peak_of(in_lists, place)  # native code steps parts only where it is asked for
    by_owners, slots = owner_peak(whole, place.shards, rank)
    if place.shards == 1:  # beside tensors whose work is divided, steps of one process
        beside = peak_of(elementwise, place) if elementwise else Peak(0, "")
        used = " + ".join(sorted({*beside.engine.split(" + "), *engines_of(whole)} - {""}))
        return Peak((beside.bytes or 0) + by_owners, used, is_bound=True, slots=slots)
    # where lists are sharded, they are not cut, and all of them wait for sums in the middle of their arithmetic
    peak = (kernel_peak(launched, sums.values()) if launched else 0) + sum(measure_item(item).peak for item in in_lists)
    used = " + ".join(sorted(engines_of((*elementwise, *whole))))
    return Peak(peak + by_owners, used, bool(in_lists or whole), slots)


def engines_of(items: Iterable[Item]) -> set[str]:
    return {"fused" if item.by_kernels or item.parted else "foreach" for item in items}
