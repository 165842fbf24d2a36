"""What ranks ask of the owners of whole tensors, and what they answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thalweg.arrays import State
from thalweg.owners import cost
from thalweg.rules import Kron
from thalweg.spaces.sharded import Part
from thalweg.torch.sharding.factors import Block, block_of_factor, factor_shapes


@dataclass(frozen=True, kw_only=True)
class Request:
    """One parameter that has to be whitened as a whole."""

    name: str
    rule: Kron
    part: Part
    #: This rank's shard of the tensor to precondition, and of the one that the factors learn from if it differs.
    tensors: Sequence[Tensor]
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
        return self.tensors[0].dtype

    @property
    def matrices(self) -> list[str]:
        return [key for key in self.factors if key.startswith("Q_")]

    @property
    def norms(self) -> list[str]:
        return [key for key in self.factors if key.startswith("L_")]

    @property
    def cost(self) -> int:
        return cost(self.rule, self.part.shape)

    def blocks(self) -> dict[str, Block]:
        """This rank's shards of the parameter and of its factors."""
        shapes = factor_shapes(self.rule, self.part.shape)
        own = {key: block_of_factor(shapes[key], self.part) for key in self.matrices}
        return {"p": Block(tuple(self.tensors[0].shape), self.part.offset), **own}


class Whitened(NamedTuple):
    """What an owner answers: of the whole tensor on its own rank, of a shard on the rank that asked."""

    h: Tensor
    #: The mean of its squares before it was clipped, for each slice of a stack.
    h_square: Tensor
    factors: State[Tensor]


@dataclass(frozen=True)
class Assembled:
    """A request as the owner has it, put together from all shards."""

    request: Request
    #: The tensor to precondition, and the one that the factors learn from if it differs.
    tensors: Sequence[Tensor]
    #: Whole, with their norms, as they are stored between steps.
    factors: State[Tensor]
