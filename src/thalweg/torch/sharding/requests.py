"""What ranks ask of the owners of whole tensors, and what they answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thalweg.rules.entries import Factor
from thalweg.rules.whole import WholeRule
from thalweg.spaces.sharded import Part
from thalweg.torch.sharding.layouts import Block, block_of_factor, factor_shapes


@dataclass(frozen=True, kw_only=True)
class Request:
    """One parameter that has to be seen as a whole."""

    name: str
    rule: WholeRule
    part: Part
    #: This rank's shard of each tensor that the rule shows.
    tensors: Sequence[Tensor]
    #: State with a shape of its own: this rank's rows of the factors, and what every rank has, such as their norms.
    factors: Mapping[str, Tensor]
    #: The dtype in which factors are stored between steps, if there are any.
    stored: torch.dtype | None
    #: Whether the owner may keep the whole factors until the next step.
    remembered: bool
    #: Whether the owner takes kernels for GPUs; the same on every rank.
    by_kernels: bool
    #: Whether the factors learn in this step, or what else is due.
    due: bool | float
    seed: int
    t: Any

    @property
    def dtype(self) -> torch.dtype:
        """That of what is shown and made: the precision of the arithmetic, or a narrower one."""
        return self.tensors[0].dtype

    @property
    def matrices(self) -> list[str]:
        """The factors."""
        return self.rule.keys(self.part.shape, Factor)

    @property
    def norms(self) -> list[str]:
        """What every rank has."""
        matrices = self.matrices
        return [key for key in self.factors if key not in matrices]

    @property
    def changes(self) -> bool:
        """Whether factors and norms are others after this step."""
        return self.rule.learns_always or bool(self.due)

    @property
    def cost(self) -> int:
        return self.rule.cost(self.part.shape)

    @property
    def is_stackable(self) -> bool:
        return self.rule.is_stackable(self.part.shape)

    def blocks(self) -> dict[str, Block]:
        """This rank's shards of the parameter and of its factors."""
        shapes = factor_shapes(self.rule, self.part.shape)
        own = {key: block_of_factor(shapes[key], self.part) for key in self.matrices}
        return {"p": Block(tuple(self.tensors[0].shape), self.part.offset), **own}
