"""What ranks ask of the owners of whole tensors, and which of it travels together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thalweg.arrays import Shape
from thalweg.rules.whole import WholeRule
from thalweg.spaces.sharded import Part
from thalweg.torch.sharding.layouts import Block, block_of_factor, factor_shapes


@dataclass(frozen=True, kw_only=True)
class Request:
    """Parameters of one bucket that have to be seen as a whole. Lists have an entry for each of them."""

    names: Sequence[str]
    rule: WholeRule
    parts: Sequence[Part]
    #: This rank's shards, for each tensor that the rule shows.
    tensors: Sequence[Sequence[Tensor]]
    #: State with a shape of its own: this rank's rows of the factors, and what every rank has, such as their norms.
    factors: Mapping[str, Sequence[Tensor]]
    #: The keys of those that are factors.
    matrices: Sequence[str]
    #: The dtype in which factors are stored between steps, if there are any.
    stored: torch.dtype | None
    #: Whether owners may keep the whole factors until the next step.
    remembered: bool
    #: Whether owners multiply by kernels for GPUs; the same on every rank.
    by_kernels: bool
    #: Whether the factors learn in this step, or what else is due.
    due: Sequence[bool | float]
    seed: int
    t: Sequence[Any]

    @property
    def dtype(self) -> torch.dtype:
        """That of what is shown and made: the precision of the arithmetic, or a narrower one."""
        return self.tensors[0][0].dtype

    @property
    def dtype_of_figures(self) -> torch.dtype:
        """They keep at least the digits of float32."""
        return self.dtype if self.dtype.itemsize > 2 else torch.float32

    @property
    def norms(self) -> list[str]:
        """The keys of those that every rank has."""
        return [key for key in self.factors if key not in self.matrices]

    @property
    def changes(self) -> bool:
        """Whether factors and norms are others after this step."""
        return bool(self.factors) and (self.rule.learns_always or any(self.due))

    def blocks(self, index: int) -> dict[str, Block]:
        """This rank's shards of a parameter and of its factors."""
        part = self.parts[index]
        shapes = factor_shapes(self.rule, part.shape)
        factors = {key: block_of_factor(shapes[key], part) for key in self.matrices}
        return {"p": Block(tuple(self.tensors[0][index].shape), part.offset), **factors}


class Batch(NamedTuple):
    """Parameters of a request that travel and are transformed together: of one shape, laid out alike, of one owner."""

    #: The places of the request, and of parameters in it.
    request: int
    members: list[int]
    #: The replica, and the rank in it.
    owner: tuple[int, int]
    shape: Shape
    #: By rank: the block of each parameter, and those of its factors.
    blocks: Sequence[Mapping[str, Block]]
    #: Whether the owner does not have their factors as a whole: they travel with the gradients.
    cold: bool

    @property
    def size(self) -> int:
        return len(self.members)
