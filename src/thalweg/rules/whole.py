"""Rules that need whole tensors: a step in three parts, so that only the middle one has to see a tensor as a whole.

Where a parameter is sharded over ranks, each rank takes the first and the last part on its own shard, and one rank, the
owner of the parameter, takes the middle one. Where several parameters are of one shape, the middle part is taken for
all of them as one stack.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from thalweg.arrays import A, Scalar, Shape, Space, State, Truth
from thalweg.rules.entries import PerSlice
from thalweg.rules.rule import Noise, Rule, Update


class Shown(NamedTuple):
    """What the first part of a step answers."""

    #: What has to be seen as a whole: arrays of the parameter's shape, in one dtype.
    tensors: tuple[Any, ...]
    #: The state so far.
    state: State[Any]
    #: Whether entries with a shape of their own (factors) change in this step.
    due: Truth = True


class Made(NamedTuple):
    """What the middle part of a step answers."""

    #: An array of the parameter's shape.
    tensor: Any
    #: Numbers by name, those of ``Rule.FIGURES``, each in the shape that ``figure_shape`` tells.
    figures: dict[str, Scalar]
    #: The entries with a shape of their own.
    state: State[Any]


@dataclass(frozen=True, kw_only=True)
class WholeRule(Rule):
    """A rule that needs whole tensors. It has :meth:`shown`, :meth:`made` and :meth:`taken`; they make its update."""

    needs_whole: ClassVar[bool] = True
    #: The names of the numbers that the middle part makes for the last one.
    FIGURES: ClassVar[tuple[str, ...]] = ()
    #: Whether the first part looks at the gradient and the state alone and the last part at what was made and the
    #: parameter alone, with figures that decide nothing but ``finite``: then fused code can be made of both.
    IN_PARTS: ClassVar[bool] = False

    @abstractmethod
    def shown(self, xp: Space[A], g: A, s: State[A], p: A, t: Scalar) -> Shown:
        """The first part, element by element: what has to be seen as a whole, and the new state as far as it goes."""

    @abstractmethod
    def made(
        self, xp: Space[A], tensors: tuple[A, ...], s: State[A], *, due: Truth = True, noise: Noise[A] | None = None
    ) -> Made:
        """The middle part: what is made of whole tensors.

        tensors: those of :meth:`shown`. s: the entries with a shape of their own, as they were before the step.
        """

    @abstractmethod
    def taken(self, xp: Space[A], made: Made, s: State[A], p: A, state: State[A], *, due: Truth, lr: Scalar) -> Update:
        """The last part, element by element: the step. state: all that the other two parts have made of it."""

    def update(
        self,
        xp: Space[A],
        g: A,
        s: State[A],
        p: A,
        *,
        t: Scalar,
        lr: Scalar | None,
        lr_scale: Scalar = 1.0,
        noise: Noise[A] | None = None,
    ) -> Update:
        assert lr is not None
        shown = self.shown(xp, g, s, p, t)
        made = self.made(xp, shown.tensors, s, due=shown.due, noise=noise)
        state = {**shown.state, **made.state}
        return self.taken(xp, made, s, p, state, due=shown.due, lr=lr * lr_scale)

    def figure_shape(self, shape: Shape) -> Shape:
        """The shape of each figure for a parameter of this shape: one number for each tensor of a stack."""
        return (math.prod(shape[: self.stacked_axes]),)

    def cost(self, shape: Shape) -> int:
        """About how many multiplications the middle part takes: by this, work is balanced over ranks."""
        return math.prod(shape)

    def tensors_shown(self) -> int:
        """How many tensors of the parameter's size are shown."""
        return 1

    def dtype_shown(self, arithmetic: str) -> str:
        """The dtype of what is shown and made, for a parameter that is computed in this precision."""
        return arithmetic

    def is_stackable(self, shape: Shape) -> bool:
        """Whether the middle part can be taken for several parameters as one stack: it needs but what is shown."""
        return not self.needs_noise and not self.keys(shape, PerSlice)
