"""Requests to the owners of whole tensors, and their answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from thalweg.arrays import State
from thalweg.rules import Kron
from thalweg.spaces.sharded import Part
from thalweg.torch.sharding.factors import Block, block_of_factor, factor_shapes


@dataclass(frozen=True, kw_only=True)
class Task:
    """One parameter that has to be whitened as a whole."""

    name: str
    rule: Kron
    part: Part
    #: This rank's shard of the tensor to precondition, and of the one that the factors learn from if it differs.
    shown: Sequence[Tensor]
    #: This rank's rows of the factors, and their norms, which every rank has.
    factors: Mapping[str, Tensor]
    #: The dtype in which factors are stored between steps.
    stored: torch.dtype
    #: Whether the owner may keep the whole factors until the next step.
    remembered: bool
    #: Whether the owner takes kernels for GPUs; the same on every rank.
    by_kernels: bool
    #: Whether the factors learn in this step.
    due: bool
    seed: int
    t: Any

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the arithmetic."""
        return self.shown[0].dtype

    @property
    def matrices(self) -> list[str]:
        return [key for key in self.factors if key.startswith("Q_")]

    @property
    def norms(self) -> list[str]:
        return [key for key in self.factors if key.startswith("L_")]

    @property
    def cost(self) -> float:
        """About how many multiplications: products with every dense factor, and of the factors with one another."""
        sizes = self.rule.sizes(self.part.shape)
        dense = [n for n, diagonal in zip(sizes, self.rule.diagonals(sizes), strict=True) if not diagonal]
        return math.prod(self.part.shape) * (1 + sum(dense)) + sum(n**3 for n in dense)

    def blocks(self) -> dict[str, Block]:
        """This rank's shards of the parameter and of its factors."""
        shapes = factor_shapes(self.rule, self.part.shape)
        own = {key: block_of_factor(shapes[key], self.part) for key in self.matrices}
        return {"p": Block(tuple(self.shown[0].shape), self.part.offset), **own}


#: This rank's shard of the whitened tensor, the mean of its squares, and the state of the factors.
Answer: TypeAlias = tuple[Tensor, Tensor, State[Tensor]]


@dataclass(frozen=True)
class Work:
    """A task as its owner has it, assembled from all shards."""

    task: Task
    #: The tensor to precondition, and the one that the factors learn from if it differs.
    shown: Sequence[Tensor]
    #: Whole, with their norms, as they are stored between steps.
    factors: State[Tensor]
