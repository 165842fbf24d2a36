"""What a rule keeps for a parameter between steps.

A rule declares its state as entries under their keys. The class of an entry is its role; with it go the extent of the
entry, its first value, and the options that decide how it is stored. Code that handles state asks for these, and
knows no key.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from thalweg.arrays import A, Shape, Space, reduced_shape


@dataclass(frozen=True)
class Entry(ABC):
    """Something that is kept for a parameter."""

    #: The options that decide how it is stored: the first that is set. Without one it is stored as it is computed.
    stored_by: ClassVar[tuple[str, ...]] = ()
    #: What eight bits mean for it: codes of numbers with a sign, or of squares. None: it cannot be held so.
    eight_bits: ClassVar[str | None] = None

    @abstractmethod
    def first(self, xp: Space[A], p: A, stacked_axes: int) -> A:
        """Its value before the first step."""

    @abstractmethod
    def shape(self, shape: Shape, stacked_axes: int) -> Shape:
        """Its shape for a parameter of this shape."""


@dataclass(frozen=True)
class Spread(Entry):
    """Laid out like the parameter."""

    #: Axes of the parameter that it is averaged over: there it has size 1.
    over: tuple[int, ...] = ()

    def first(self, xp: Space[A], p: A, stacked_axes: int) -> A:
        return xp.zeros_reduced(p, self.over) if self.over else xp.zeros_like(p)

    def shape(self, shape: Shape, stacked_axes: int) -> Shape:
        return reduced_shape(shape, self.over)


@dataclass(frozen=True)
class Copy(Spread):
    """Begins as a copy of the parameter."""

    def first(self, xp: Space[A], p: A, stacked_axes: int) -> A:
        return p * 1.0  # in memory of its own


@dataclass(frozen=True)
class PerSlice(Entry):
    """Of a shape of its own, once for every tensor of a stack."""

    #: Its shape for one tensor.
    sizes: Shape = ()

    def first(self, xp: Space[A], p: A, stacked_axes: int) -> A:
        return xp.full(self.shape(xp.shape(p), stacked_axes), 0.0, p)

    def shape(self, shape: Shape, stacked_axes: int) -> Shape:
        return (*shape[:stacked_axes], *self.sizes)


@dataclass(frozen=True)
class Moment(Spread):
    """An average or a sum of gradients or of updates, of either sign."""

    stored_by: ClassVar[tuple[str, ...]] = ("momentum_dtype", "state_dtype")
    eight_bits = "int8"


@dataclass(frozen=True)
class SlowMoment(Moment):
    """One that moves by so little in a step that 16 bits may round it away: ``momentum_dtype`` leaves it alone."""

    stored_by = ("state_dtype",)


@dataclass(frozen=True)
class Square(Spread):
    """An average of squares, never negative."""

    stored_by = ("state_dtype",)
    eight_bits = "uint8"


@dataclass(frozen=True)
class Factor(PerSlice):
    """A matrix that begins as a multiple of the identity, or several one below another; or the diagonal of one."""

    scale: float = 1.0
    #: How often all of its rows are repeated, and how often each: for blocks along the axes before and after its own.
    repeated: tuple[int, int] = (1, 1)
    stored_by = ("precond_dtype", "state_dtype")

    def first(self, xp: Space[A], p: A, stacked_axes: int) -> A:
        shape = self.shape(xp.shape(p), stacked_axes)
        if len(self.sizes) == 1 or self.scale == 0:
            return xp.full(shape, self.scale, p)
        (rows, side), (before, after) = self.sizes, self.repeated
        matrix_rows = rows // (before * after)  # of several matrices, the last of which may have fewer rows
        scales = xp.full((*shape[:stacked_axes], before, matrix_rows, after, side), self.scale, p)
        matrices = -(-matrix_rows // side)
        identities = xp.full((matrices, 1, 1), 1.0, p) * xp.reshape(xp.identity(side, p), (1, side, side))
        one_below_another = xp.reshape(identities, (matrices * side, 1, side))
        identity_rows = xp.cut(one_below_another, 0, (matrix_rows, matrices * side - matrix_rows))[0]
        return xp.reshape(scales * xp.reshape(identity_rows, (*[1] * stacked_axes, 1, matrix_rows, 1, side)), shape)


@dataclass(frozen=True)
class Norm(PerSlice):
    """A number for every tensor of a stack."""


@dataclass(frozen=True)
class Count(Entry):
    """A number for the parameter as a whole that decides what is done in a step: the host may want to know it."""

    def first(self, xp: Space[A], p: A, stacked_axes: int) -> A:
        return xp.full((), 0.0, p)

    def shape(self, shape: Shape, stacked_axes: int) -> Shape:
        return ()
