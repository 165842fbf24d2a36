"""Kron's factors of sharded parameters: which rank keeps which rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from thalweg.arrays import Shape, State
from thalweg.boundary import first_state, storage
from thalweg.rules import Kron
from thalweg.rules.blocks import is_zero
from thalweg.settings import Handling
from thalweg.spaces import torch as xp
from thalweg.spaces.sharded import Part
from thalweg.torch.shards import distributed, placed_like


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


def factor_shapes(rule: Kron, shape: Shape) -> dict[str, Shape]:
    """Of the whole factors of a parameter."""
    stack, sizes = shape[: rule.stacked_axes], rule.sizes(shape)
    return {
        f"Q_{i}": (*stack, n) if diagonal else (*stack, n, n)
        for i, (n, diagonal) in enumerate(zip(sizes, rule.diagonals(sizes), strict=True))
    }


def first_owned(p: Tensor, held: Tensor, part: Part, rule: Kron, handling: Handling) -> State[Tensor]:
    """The state of a distributed parameter before its first step: momentum like itself, and rows of every factor."""
    kept = {}
    if not is_zero(rule.momentum):
        dtype = storage("momentum_buffer", xp.dtype(held), handling)
        kept["momentum_buffer"] = placed_like(torch.zeros_like(held, dtype=getattr(torch, dtype)), p, ())
    # a whole tensor that takes no memory: factors follow its shape, dtype and device alone
    ghost = torch.zeros((), dtype=p.dtype, device=held.device).expand(p.shape)
    made = first_state(xp, replace(rule, momentum=0.0), handling, ghost)
    return {**kept, **(divided(made, part) if any(part.groups) else made)}


def divided(made: State[Tensor], part: Part) -> State[Tensor]:
    """Whole factors as DTensors, sharded by rows."""
    mesh, placements = placements_of_factors(part)
    for key, entry in made.items():
        if key.startswith("Q_"):
            rows = block_of_factor(tuple(entry.shape), part).of(entry).clone()
            made[key] = distributed(rows, mesh, placements, entry.shape)
    return made
