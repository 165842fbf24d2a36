"""Factors of sharded parameters: which rank keeps which rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thalweg.arrays import Shape, State
from thalweg.rules import Rule
from thalweg.rules.entries import Factor, Spread
from thalweg.settings import Handling
from thalweg.spaces import torch as xp
from thalweg.spaces.foreach import TensorList
from thalweg.spaces.sharded import Part, Sharded
from thalweg.storage import arithmetic, encoded, first_record, storage
from thalweg.torch.sharding.codes import placed
from thalweg.torch.sharding.shards import distributed


@dataclass(frozen=True)
class Block:
    """The place of a shard in the whole: its shape, and where it begins."""

    shape: Shape
    offset: Shape

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def of(self, whole: Tensor) -> Tensor:
        """The shard of a whole tensor, sharing its memory."""
        return whole[tuple(slice(begin, begin + size) for begin, size in zip(self.offset, self.shape, strict=True))]


def placements_of_factors(part: Part) -> tuple[Any, list[Any]]:
    """Shard factors by rows, over the same mesh dimensions as their parameter."""
    from torch.distributed.tensor import Replicate, Shard

    groups = part.across(None)
    mesh, dimensions = groups[0].mesh, {group.dimension for group in groups}
    return mesh, [Shard(0) if dimension in dimensions else Replicate() for dimension in range(mesh.ndim)]


def block_of_factor(shape: Shape, part: Part) -> Block:
    """This rank's rows of a factor of a sharded parameter."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    held, offset = compute_local_shape_and_global_offset(shape, *placements_of_factors(part))
    return Block(tuple(held), tuple(offset))


def factor_shapes(rule: Rule, shape: Shape) -> dict[str, Shape]:
    """Of the whole factors of a parameter."""
    kept = rule.entries(shape).items()
    return {key: entry.shape(shape, rule.stacked_axes) for key, entry in kept if isinstance(entry, Factor)}


def first_owned(p: Tensor, held: Tensor, part: Part, rule: Rule, handling: Handling) -> State[Tensor]:
    """The state of a distributed parameter before its first step: momentum like itself, and rows of every factor."""
    # a whole tensor that takes no memory: factors follow its shape, dtype and device alone
    ghost = torch.zeros((), dtype=getattr(torch, arithmetic(xp.dtype(held))), device=held.device).expand(p.shape)
    made: State[Tensor] = {}
    space, listed = Sharded([part]), TensorList([held])
    for key, entry in rule.entries(tuple(p.shape)).items():
        if isinstance(entry, Spread):
            first = entry.first(space, space.astype(listed, arithmetic(xp.dtype(held))), rule.stacked_axes)
            made.update(placed(encoded(space, rule, handling, listed, {key: first}), p, rule))
            continue
        value = xp.astype(entry.first(xp, ghost, rule.stacked_axes), storage(entry, xp.dtype(held), handling))
        made[key] = divided(value, part) if isinstance(entry, Factor) and any(part.groups) else value
    return {**made, **placed(first_record(space, handling, listed), p, rule)}


def divided(factor: Tensor, part: Part) -> Tensor:
    """A whole factor as a DTensor, of which each rank keeps its rows."""
    rows = block_of_factor(tuple(factor.shape), part).of(factor).clone()
    return distributed(rows, *placements_of_factors(part), factor.shape)
