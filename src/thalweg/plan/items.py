"""Parameters with what holds for them: whole ones, and what a rank holds of one."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace

from thalweg.arrays import Axes, Shape
from thalweg.plan.models import Tensor
from thalweg.programs import budget
from thalweg.rules import Rule
from thalweg.rules.entries import Entry
from thalweg.rules.whole import WholeRule, is_remembered
from thalweg.settings import Setting
from thalweg.storage import Kept, kind


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
    #: Ranks that have the same parts and may divide the work on whole tensors.
    replicas: int = 1

    @property
    def is_divided(self) -> bool:
        """Whether each rank has a part of every parameter."""
        return self.shards > 1

    @property
    def shards(self) -> int:
        """Into how many parts each parameter is divided."""
        return self.world // self.replicas if self.layout in ("fsdp2", "hsdp") else 1


@dataclass(frozen=True)
class Item:
    """One parameter, or the shard of one, with what holds for it."""

    tensor: Tensor
    setting: Setting
    #: The shape of the whole parameter, if this is a shard, and by axis the mesh dimensions that divide it.
    whole: Shape | None = None
    mesh: tuple[tuple[str, ...], ...] = ()
    is_sharded: bool = False
    #: The rank that transforms the parameter as a whole; None: every rank does, or none has to.
    owner: int | None = None
    #: How many replicas have it transformed by one owner.
    replicas: int = 1
    #: Whether kernels for GPUs step this shard, or transform the whole for its owner.
    by_kernels: bool = False

    @property
    def shape(self) -> Shape:
        """Of the whole parameter."""
        return self.tensor.shape if self.whole is None else self.whole

    @property
    def rule(self) -> Rule:
        return self.setting.rule_at(1)

    @property
    def entries(self) -> dict[str, Kept]:
        """Shape and dtype of everything that is kept for it, like the parameter in shards; factors are whole."""
        held = None if self.whole is None else self.tensor.shape
        return dict(entries_of(self.setting, self.shape, self.tensor.dtype, held))

    @property
    def kind(self) -> Hashable:
        """Equal for those that may be stepped together."""
        return self.setting, self.tensor.dtype, kind(self.rule, self.setting.handling, self.shape)

    @property
    def remembers(self) -> bool:
        """Whether the owner keeps whole factors from step to step, beside its state."""
        return self.is_sharded and is_remembered(self.setting.handling.on_nonfinite)

    def keys(self, role: type[Entry]) -> list[str]:
        return keys_of(self.setting, self.shape, role)

    def whole_item(self) -> Item:
        """The whole parameter of which this is a shard."""
        return Item(replace(self.tensor, shape=self.shape), self.setting, is_sharded=self.is_sharded)

    def across(self, axes: Axes) -> tuple[str, ...]:
        """The mesh dimensions over which a sum along these axes goes."""
        chosen = range(len(self.mesh)) if axes is None or not self.mesh else axes
        return tuple(dict.fromkeys(dimension for axis in chosen for dimension in self.mesh[axis]))


# models have many parameters of few shapes
entries_of = functools.lru_cache(maxsize=4096)(budget.state_entries)


@functools.lru_cache(maxsize=4096)
def keys_of(setting: Setting, shape: Shape, role: type[Entry]) -> list[str]:
    return setting.rule_at(1).keys(shape, role)


def item_of(tensor: Tensor, setting: Setting, world: int = 1, rank: int = 0) -> Item:
    """What a rank holds of a parameter: of the first axis its part, as FSDP2 cuts it; without axes, all."""
    setting = setting.for_shape(tensor.shape)
    if world == 1:
        return Item(tensor, setting)
    mesh = (("ranks",), *((),) * (len(tensor.shape) - 1)) if tensor.shape else ()
    rule = setting.rule_at(1)
    if isinstance(rule, WholeRule) and tensor.shape and rule.has_whole_slices(tensor.shape, (0,)):
        return Item(local(tensor, world, rank), setting, mesh=mesh)
    return Item(local(tensor, world, rank), setting, tensor.shape, mesh, is_sharded=bool(tensor.shape))


def shard(size: int, world: int, rank: int) -> int:
    """How much of an axis a rank has: whole chunks of ceil(size / world), as torch.chunk cuts them."""
    chunk = -(-size // world)
    return max(0, min(chunk, size - rank * chunk))


def local(tensor: Tensor, world: int, rank: int) -> Tensor:
    """A rank's part of a parameter; tensors without axes are everywhere."""
    if not tensor.shape:
        return tensor
    return Tensor(tensor.name, (shard(tensor.shape[0], world, rank), *tensor.shape[1:]), tensor.dtype)


def sort_items(items: Iterable[Item], key: Callable[[Item], Hashable]) -> list[list[Item]]:
    """Items of equal keys together, in their order."""
    found: dict[Hashable, list[Item]] = defaultdict(list)
    for item in items:
        found[key(item)].append(item)
    return list(found.values())
