"""Tensors cut into blocks, each with factors of its own. Blocks of equal size are one stack.

Along an axis there are blocks of one side, and perhaps a smaller one at the end: a tensor of k axes has at most 2^k
stacks. Tensors here have one leading batch axis, (b, n_1, ..., n_k), as in :mod:`thalweg.rules.factors`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import TypeAlias

from thalweg.arrays import A, Shape, Space
from thalweg.rules.entries import Factor, Norm

#: Blocks along an axis: (how many, their size), those of one size after those of another.
Runs: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Grid:
    """A tensor of these sizes in blocks of these sides, of which the last along an axis may be smaller."""

    sizes: Shape
    sides: Shape

    @classmethod
    def make(cls, sizes: Shape, is_cut: Sequence[bool], block_size: int | None) -> Grid:
        """The blocks of a tensor that is cut along some axes. block_size: None cuts nothing."""
        most = max(sizes) if block_size is None else block_size
        return cls(sizes, tuple(min(n, most) if cut else n for n, cut in zip(sizes, is_cut, strict=True)))

    @property
    def runs(self) -> list[Runs]:
        return [
            ((1, n),) if n <= side else ((n // side, side), *([(1, n % side)] if n % side else []))
            for n, side in zip(self.sizes, self.sides, strict=True)
        ]

    @property
    def counts(self) -> Shape:
        """How many blocks there are along each axis."""
        return tuple([sum([count for count, _ in axis_runs]) for axis_runs in self.runs])

    @property
    def blocks(self) -> int:
        return math.prod(self.counts)

    def cut(self, xp: Space[A], x: A) -> list[A]:
        """The stacks of blocks, (b', s_1, ..., s_k), of (b, n_1, ..., n_k)."""
        return cut_runs(xp, x, self.runs)

    def join(self, xp: Space[A], stacks: Sequence[A]) -> A:
        """What was cut, as one array again."""
        return join_runs(xp, stacks, self.runs)

    # ---- what is kept for the blocks: one array for each axis, with the rows of all factors one below the other

    def factor(self, axis: int, scale: float, *, diagonal: bool = False) -> Factor:
        """The factors of all blocks for an axis. Diagonal ones are for axes that are not cut."""
        before, after = math.prod(self.counts[:axis]), math.prod(self.counts[axis + 1 :])
        rows = before * self.sizes[axis] * after
        return Factor((rows,) if diagonal else (rows, self.sides[axis]), scale, (before, after))

    def norm(self) -> Norm:
        """A number for every block: a column of them, if there are several."""
        return Norm() if self.blocks == 1 else Norm((self.blocks, 1))

    def cut_factor(self, xp: Space[A], q: A, axis: int, batch: int, *, diagonal: bool = False) -> list[A]:
        """For each stack the factors for an axis: (b', s, s), or (b', s) if they are diagonal."""
        side, stacks = self.sides[axis], []
        shape = (batch, *self.counts[:axis], self.sizes[axis], *self.counts[axis + 1 :])
        for stack in cut_runs(xp, xp.reshape(q, shape if diagonal else (*shape, side)), self.along(axis)):
            count, rows = xp.shape(stack)[0], xp.shape(stack)[1 + axis]
            stack = xp.reshape(stack, (count, rows) if diagonal else (count, rows, side))
            stacks.append(stack if diagonal or rows == side else xp.cut(stack, 2, (rows, side - rows))[0])
        return stacks

    def join_factor(self, xp: Space[A], stacks: Sequence[A], axis: int) -> A:
        """All factors for an axis as they are kept: smaller ones are filled up with columns of zeros."""
        side, reshaped = self.sides[axis], []
        for stack in stacks:
            count, rows, *columns = xp.shape(stack)
            if columns and rows < side:
                stack = xp.join([stack, xp.full((count, rows, side - rows), 0.0, stack)], 2)
            sizes = [rows if i == axis else 1 for i in range(len(self.sizes))]
            reshaped.append(xp.reshape(stack, (count, *sizes, *([side] if columns else []))))
        return join_runs(xp, reshaped, self.along(axis))

    def cut_norm(self, xp: Space[A], norm: A, batch: int) -> list[A]:
        """For each stack the numbers of its blocks: (b',)."""
        stacks = cut_runs(xp, xp.reshape(norm, (batch, *self.counts)), self.along(None))
        return [xp.reshape(stack, xp.shape(stack)[:1]) for stack in stacks]

    def join_norm(self, xp: Space[A], stacks: Sequence[A]) -> A:
        ones = [1] * len(self.sizes)
        return join_runs(xp, [xp.reshape(stack, (xp.shape(stack)[0], *ones)) for stack in stacks], self.along(None))

    def along(self, axis: int | None) -> list[Runs]:
        """The runs of an array that has the tensor's size along one axis, and an entry for each block along others."""
        return [runs if i == axis else tuple((count, 1) for count, _ in runs) for i, runs in enumerate(self.runs)]


def cut_runs(xp: Space[A], x: A, runs: Sequence[Runs]) -> list[A]:
    """Stacks of blocks, one for every choice of a run along each axis."""
    pieces = [x]
    for axis, axis_runs in enumerate(runs, 1):
        if len(axis_runs) > 1:
            sizes = tuple(count * size for count, size in axis_runs)
            pieces = [part for piece in pieces for part in xp.cut(piece, axis, sizes)]
    return [to_stack(xp, piece, chosen) for piece, chosen in zip(pieces, product(*runs), strict=True)]


def join_runs(xp: Space[A], stacks: Sequence[A], runs: Sequence[Runs]) -> A:
    """The array that ``cut_runs`` has cut into these stacks."""
    pieces = [from_stack(xp, stack, chosen) for stack, chosen in zip(stacks, product(*runs), strict=True)]
    for axis, axis_runs in reversed(list(enumerate(runs, 1))):
        if (n := len(axis_runs)) > 1:
            pieces = [xp.join(pieces[i : i + n], axis) for i in range(0, len(pieces), n)]
    return pieces[0]


def to_stack(xp: Space[A], x: A, chosen: Runs) -> A:
    """(b, c_1 s_1, ..., c_k s_k, ...) as (b c_1 ... c_k, s_1, ..., s_k, ...)."""
    blocks, (batch, *sizes) = math.prod([count for count, _ in chosen]), xp.shape(x)
    if blocks == 1:
        return x
    rest = sizes[len(chosen) :]
    x = xp.reshape(x, (batch, *chain(*chosen), *rest))
    for axis in swaps(len(chosen)):
        x = xp.swapaxes(x, axis, axis - 1)
    return xp.reshape(x, (batch * blocks, *(size for _, size in chosen), *rest))


def from_stack(xp: Space[A], x: A, chosen: Runs) -> A:
    """The way back from ``to_stack``."""
    blocks, (stacked, *sizes) = math.prod([count for count, _ in chosen]), xp.shape(x)
    if blocks == 1:
        return x
    counts, rest = [count for count, _ in chosen], sizes[len(chosen) :]
    x = xp.reshape(x, (stacked // blocks, *counts, *sizes))
    for axis in reversed(swaps(len(chosen))):
        x = xp.swapaxes(x, axis, axis - 1)
    return xp.reshape(x, (stacked // blocks, *(count * size for count, size in chosen), *rest))


def swaps(axes: int) -> list[int]:
    """The axes that change places with the one before, so that (b, c_1, s_1, ...) becomes (b, c_1, ..., s_1, ...)."""
    return [axis for i in range(1, axes) for axis in range(1 + 2 * i, 1 + i, -1)]
