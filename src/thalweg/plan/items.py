"""Parameters with what holds for them: whole ones, and what a rank holds of one."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

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
    #: Ranks that have the same parts and may divide the work on whole tensors.
    replicas: int = 1
    #: Ranks of a replica that divide projections and embeddings between them, before FSDP2 divides their parts.
    tp: int = 1

    @property
    def is_divided(self) -> bool:
        """Whether each rank has a part of every parameter."""
        return self.shards > 1

    @property
    def shards(self) -> int:
        """The ranks of a replica: those of FSDP2, and for each of them those of tensor parallelism."""
        return 1 if self.layout == "ddp" else self.world // self.replicas

    @property
    def sizes(self) -> dict[str, int]:
        """By mesh dimension, the ranks over which parameters are divided."""
        return {"ranks": self.shards // self.tp, "tp": self.tp}

    def seats(self, rank: int) -> dict[str, int]:
        """By mesh dimension, a rank among those that divide parameters."""
        return dict(zip(("ranks", "tp"), divmod(rank % self.shards, self.tp), strict=True))


class Cut(NamedTuple):
    """How a mesh dimension divides a parameter: along which axis, over how many ranks, and this rank among them."""

    name: str
    axis: int
    ranks: int
    seat: int


@dataclass(frozen=True)
class Item:
    """One parameter, or the shard of one, with what holds for it."""

    tensor: Tensor
    setting: Setting
    #: The shape of the whole parameter, if this is a shard, and how it is cut, first to last.
    whole: Shape | None = None
    cuts: tuple[Cut, ...] = ()
    is_sharded: bool = False
    #: The rank that transforms the parameter as a whole; None: every rank does, or none has to.
    owner: int | None = None
    #: How many replicas have it transformed by one owner.
    replicas: int = 1
    #: Whether kernels for GPUs step this shard, or transform the whole for its owner.
    by_kernels: bool = False
    #: Whether kernels for GPUs step this shard before and after its owner.
    parted: bool = False

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

    @property
    def team(self) -> tuple[str, ...]:
        """The mesh dimensions over which it is divided, whichever axes they divide."""
        return tuple(sorted(cut.name for cut in self.cuts))

    @property
    def shards(self) -> int:
        """Over how many ranks it is divided."""
        return math.prod(cut.ranks for cut in self.cuts)

    def keys(self, role: type[Entry]) -> list[str]:
        return keys_of(self.setting, self.shape, role)

    def whole_item(self) -> Item:
        """The whole parameter of which this is a shard."""
        return Item(replace(self.tensor, shape=self.shape), self.setting, is_sharded=self.is_sharded)

    def across(self, axes: Axes) -> tuple[str, ...]:
        """The mesh dimensions over which a sum along these axes goes."""
        along = range(len(self.shape)) if axes is None else {axis % len(self.shape) for axis in axes if self.shape}
        return tuple(dict.fromkeys(cut.name for cut in self.cuts if cut.axis in along))


# models have many parameters of few shapes
entries_of = functools.lru_cache(maxsize=4096)(budget.state_entries)


@functools.lru_cache(maxsize=4096)
def keys_of(setting: Setting, shape: Shape, role: type[Entry]) -> list[str]:
    return setting.rule_at(1).keys(shape, role)


def item_of(tensor: Tensor, setting: Setting, place: Place | None = None, rank: int = 0) -> Item:
    """What a rank holds of a parameter; without axes, all."""
    setting = setting.for_shape(tensor.shape)
    cuts = () if place is None else cuts_of(tensor, place, rank)
    if place is None or not cuts:
        return Item(tensor, setting)
    held, rule = local(tensor, place, rank), setting.rule_at(1)
    if isinstance(rule, WholeRule) and rule.has_whole_slices(tensor.shape, tuple(cut.axis for cut in cuts)):
        return Item(held, setting, cuts=cuts)
    return Item(held, setting, tensor.shape, cuts, is_sharded=True)


#: By the name of its module, the axis of a weight that tensor parallelism divides: outputs of the first projections of
#: a block, inputs of its last ones, words of embeddings. GPT-2 stores projections the other way around.
COLUMNS = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj"),
    *("query", "key", "value", "intermediate.dense"),
)
DIVIDED_BY_TP: dict[str, int] = {
    **dict.fromkeys([*COLUMNS, "embed_tokens", "lm_head", "word_embeddings", "wte"], 0),
    **dict.fromkeys(("o_proj", "down_proj", "output.dense"), 1),
    **{"c_attn": 1, "c_fc": 1, "c_proj": 0},
}


@functools.lru_cache(maxsize=4096)
def tp_axis(tensor: Tensor) -> int | None:
    """The axis that tensor parallelism divides, by Megatron's rule; biases lie like the outputs they are added to."""
    module, _, kind = tensor.name.rpartition(".")
    known = [name for name in DIVIDED_BY_TP if f".{module}".endswith(f".{name}")]
    if not known or not tensor.shape:
        return None
    if kind == "bias":
        return 0 if known[0] in (*COLUMNS, "c_attn", "c_fc") else None
    return DIVIDED_BY_TP[known[0]] if len(tensor.shape) == 2 else None


def cuts_of(tensor: Tensor, place: Place, rank: int = 0) -> tuple[Cut, ...]:
    """How mesh dimensions divide a parameter: tensor parallelism cuts first, and FSDP2 then the first axis."""
    axes, seats = {"tp": tp_axis(tensor), "ranks": 0 if tensor.shape else None}, place.seats(rank)
    sizes = place.sizes
    return tuple(
        Cut(name, axis, sizes[name], seats[name]) for name, axis in axes.items() if axis is not None and sizes[name] > 1
    )


def shard(size: int, world: int, rank: int) -> int:
    """How much of an axis a rank has: whole chunks of ceil(size / world), as torch.chunk cuts them."""
    chunk = -(-size // world)
    return max(0, min(chunk, size - rank * chunk))


def local(tensor: Tensor, place: Place, rank: int) -> Tensor:
    """A rank's part of a parameter."""
    shape = list(tensor.shape)
    for cut in cuts_of(tensor, place, rank):
        shape[cut.axis] = shard(shape[cut.axis], cut.ranks, cut.seat)
    return replace(tensor, shape=tuple(shape))


def sort_items(items: Iterable[Item], key: Callable[[Item], Hashable]) -> list[list[Item]]:
    """Items of equal keys together, in their order."""
    found: dict[Hashable, list[Item]] = defaultdict(list)
    for item in items:
        found[key(item)].append(item)
    return list(found.values())
