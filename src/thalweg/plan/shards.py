"""What one rank has and does: all of it under ddp, a part of each parameter under fsdp2.

State lies as its parameter does: statistics of rows with their rows, those of columns on every rank. Kron's factors
are stored in parts beside a whole copy at the rank that owns the parameter and does its products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from thalweg.arrays import Shape
from thalweg.boundary import arithmetic
from thalweg.plan import costs
from thalweg.plan.models import Tensor
from thalweg.plan.parts import Part, divided_peak, messages, part_entries
from thalweg.plan.peaks import Item, numpy_peak, torch_peak
from thalweg.rules import Adafactor, Kron
from thalweg.settings import Setting
from thalweg.spaces.shape_arrays import BYTES


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
    flops_between: int
    engine: str

    @property
    def total_bytes(self) -> int:
        """Parameters, gradients, state, and what a step needs besides."""
        return 2 * self.parameter_bytes + self.state_bytes + (self.peak_bytes or 0)


@dataclass(frozen=True)
class Place:
    """Where steps are taken, and by what."""

    front_end: str
    device: str
    engine: str
    world: int
    layout: str


def largest_share(setting: Setting, tensors: Sequence[Tensor], place: Place) -> Share:
    """The share of the rank that needs most."""
    if not is_divided(place) or not has_owners(setting):
        return share_of(setting, tensors, place, 0)  # no other has more
    ranks = (share_of(setting, tensors, place, rank) for rank in range(place.world))
    return max(ranks, key=lambda share: share.total_bytes)


def share_of(setting: Setting, tensors: Sequence[Tensor], place: Place, rank: int) -> Share:
    """The share of one rank."""
    if not is_divided(place):
        return whole_share(setting, tensors, place, rank)
    if has_owners(setting):
        owned = costs.owners(setting, tensors, place.world)
        return owner_share(setting, tensors, place, owned, rank)
    return part_share(setting, tensors, place, rank)


def is_divided(place: Place) -> bool:
    return place.world > 1 and place.layout == "fsdp2"


def has_owners(setting: Setting) -> bool:
    """Whether whole tensors are worked on, each by one rank; slices that stand alone are whole where they are."""
    return setting.rule.needs_whole and not setting.rule.stacked_axes


def whole_share(setting: Setting, tensors: Sequence[Tensor], place: Place, rank: int) -> Share:
    """Everything, as every rank has it."""
    items = [Item(tensor, setting) for tensor in tensors]
    entries = [entry for tensor in tensors for entry in costs.state_entries(setting, tensor).values()]
    return of_items(items, entries, place, rank, peak_of(items, place))


def part_share(setting: Setting, tensors: Sequence[Tensor], place: Place, rank: int) -> Share:
    """A part of every parameter."""
    parts = [part_of(tensor, place.world, rank) for tensor in tensors]
    items = [Item(part.held, decided(setting, part.whole.shape)) for part in parts]
    if setting.rule.needs_whole:
        entries = [entry for part in parts for entry in costs.state_entries(setting, part.held).values()]
        return of_items(items, entries, place, rank, peak_of(items, place))
    entries = [entry for part in parts for entry in part_entries(setting, part).values()]
    sent = messages(setting, parts)
    return replace(
        of_items(items, entries, place, rank, divided_peak(items)),
        sent_bytes=costs.ring(sum(sent.values()), place.world),
        collectives=len(sent),
    )


def part_of(tensor: Tensor, world: int, rank: int) -> Part:
    """A rank's part of the first axis of a parameter; tensors without axes are everywhere."""
    divided = [("ranks",), *((),) * (len(tensor.shape) - 1)] if tensor.shape else []
    return Part(tensor, costs.local(tensor, world, rank), tuple(divided))


def of_items(
    items: Sequence[Item], entries: Sequence[costs.Entry], place: Place, rank: int, peak: tuple[int | None, str]
) -> Share:
    """A share of parameters that are stepped where they are, and nothing sent."""
    counters = costs.counter_bytes(place.front_end, len(items), items[0].setting)
    return Share(
        rank=rank,
        parameter_bytes=sum(costs.parameter_bytes(item.tensor) for item in items),
        state_bytes=counters + sum(map(costs.entry_bytes, entries)),
        peak_bytes=peak[0],
        moved_bytes=sum(costs.bytes_moved(item.setting, item.tensor) for item in items),
        moved_between=sum(costs.bytes_moved(item.setting, item.tensor, refresh=False) for item in items),
        sent_bytes=0,
        collectives=0,
        flops=sum(costs.flops(item.setting, item.tensor) for item in items),
        flops_between=sum(costs.flops(item.setting, item.tensor, refresh=False) for item in items),
        engine=peak[1],
    )


def owner_share(setting: Setting, tensors: Sequence[Tensor], place: Place, owned: costs.Owned, rank: int) -> Share:
    """A part of every parameter, and the products of those that this rank owns."""
    world = place.world
    parts = [costs.local(tensor, world, rank) for tensor in tensors]
    mine = [tensors[index] for index in owned.of(rank)]
    state = costs.counter_bytes(place.front_end, len(tensors), setting)
    for tensor, owner in zip(tensors, owned.owners, strict=True):
        for key, (shape, dtype) in costs.state_entries(setting, tensor).items():
            is_factor = key.startswith("Q_")
            first = costs.shard(shape[0], world, rank) if is_factor else 0
            kept = (first, *shape[1:]) if is_factor else local_shape(shape, tensor, world, rank)
            state += costs.entry_bytes((kept, dtype)) + (
                costs.entry_bytes((shape, dtype)) if is_factor and owner == rank else 0
            )
    # gradients that came whole, updates that go back, and this rank's parts of all updates
    buffers = sum(costs.parameter_bytes(tensor) + updates(tensor) for tensor in mine) + sum(map(updates, parts))
    assert isinstance(setting.rule, Kron)
    kept_apart = replace(setting, rule=replace(setting.rule, momentum=0.0))  # momentum stays in parts
    peak, engine = peak_of([Item(tensor, kept_apart) for tensor in mine], place)

    def moved(refresh: bool) -> int:
        products = sum(costs.moved_by_products(setting, tensor, refresh=refresh) for tensor in mine)
        return products + sum(costs.moved_by_applying(setting, part) for part in parts)

    return Share(
        rank=rank,
        parameter_bytes=sum(map(costs.parameter_bytes, parts)),
        state_bytes=state,
        peak_bytes=None if peak is None else peak + buffers,
        moved_bytes=moved(True),
        moved_between=moved(False),
        sent_bytes=costs.exchanged_bytes(setting, tensors, owned, world, rank),
        collectives=2,
        flops=sum(costs.flops(setting, tensor) for tensor in mine),
        flops_between=sum(costs.flops(setting, tensor, refresh=False) for tensor in mine),
        engine=engine,
    )


def updates(tensor: Tensor) -> int:
    """Bytes of an update, which is computed in the precision of the arithmetic."""
    return tensor.elements * BYTES[arithmetic(tensor.dtype)]


def peak_of(items: Sequence[Item], place: Place) -> tuple[int | None, str]:
    if place.front_end == "optax":
        return None, "XLA"
    if place.front_end == "numpy":
        return numpy_peak(items, engine=place.engine)
    return torch_peak(items, engine=place.engine, device=place.device)


@dataclass(frozen=True, kw_only=True)
class DecidedAdafactor(Adafactor):
    """Adafactor that factors a part as it would the whole."""

    axes: tuple[int, int] | None = None

    def factored_axes(self, shape: Shape) -> tuple[int, int] | None:
        return self.axes


def decided(setting: Setting, shape: Shape) -> Setting:
    """The setting for a part of a tensor whose whole has this shape."""
    rule = setting.rule
    if not isinstance(rule, Adafactor) or isinstance(rule, DecidedAdafactor):
        return setting
    options = {f.name: getattr(rule, f.name) for f in fields(rule)}
    return replace(setting, rule=DecidedAdafactor(**options, axes=rule.factored_axes(shape)))


def local_shape(shape: Shape, tensor: Tensor, world: int, rank: int) -> Shape:
    """What a rank has of something that is kept for a parameter: its part of the first axis, where that is there."""
    if not shape or not tensor.shape or shape[0] != tensor.shape[0]:
        return shape
    return (costs.shard(shape[0], world, rank), *shape[1:])
