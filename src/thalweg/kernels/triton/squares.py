"""Sums of squares of many gradients, wherever they are: one launch, and one that adds up."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

from thalweg.kernels.triton.blocks import ACROSS, GEOMETRY, Grid, cut_into_runs
from thalweg.kernels.triton.passes import dtype_of
from thalweg.kernels.triton.rows import Tensor, loaded, pointer
from thalweg.kernels.triton.stages import BLOCK
from thalweg.kernels.triton.sums import FACTS, Statistic, Sums
from thalweg.kernels.triton.tables import Gradients
from thalweg.programs.extents import ELEMENT, TENSOR

#: Blocks of a run that one program adds up.
BLOCKS = 4


@triton.jit
def squares_kernel(
    tensors,
    gradients,
    pieces,
    partials,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum of squares of one run of a gradient."""
    part = tl.program_id(0)
    row, first = tl.load(pieces + 2 * part), tl.load(pieces + 2 * part + 1).to(tl.int64) * CHUNK
    size = tl.load(tensors + row.to(tl.int64) * (GEOMETRY + FACTS) + ACROSS)
    place, left = pointer(tl.load(gradients + row), DTYPE, ALIGNED) + first, size - first
    total = tl.zeros((BLOCK,), tl.float32)
    if left >= CHUNK:
        for block in tl.static_range(CHUNK // BLOCK):
            x = loaded(place + block * BLOCK + tl.arange(0, BLOCK), None)
            total += x * x
    else:
        for block in tl.static_range(CHUNK // BLOCK):
            index = block * BLOCK + tl.arange(0, BLOCK)
            x = loaded(place + index, index < left)
            total += x * x
    tl.store(partials + part, tl.sum(total))


class GradientSquares(Gradients):
    """Gradients of one dtype, whose squares are summed."""

    def __init__(self, sizes: Sequence[int], dtype: Any, uploads: Any, compiled: Any) -> None:
        """sizes: elements of each."""
        super().__init__(len(sizes), uploads)
        #: The addresses that were noted last.
        self.known = array("Q")
        self.dtype, self.compiled = dtype_of(dtype), compiled
        cuts = cut_into_runs(sizes, BLOCKS)
        self.grid = Grid(cuts, uploads, is_summed=False, vector=1)
        self.sums = Sums([Statistic(TENSOR, ELEMENT, 0)], {0: self.grid}, [(cut, cut) for cut in cuts], uploads)

    def follow(self, places: array[int]) -> None:
        """Note where the gradients are now."""
        # a graph carries its own copy along, which its replays leave in the table
        if places != self.known or self.uploads.captured or self.uploads.is_capturing():
            self.known = places
            self.follow_places(places)

    def measure(self) -> Tensor:
        """The sum of squares of each."""
        if self.grid.count:
            self.compiled.run(
                squares_kernel,
                (self.grid.count,),
                (self.sums.tensors, self.gradients, self.grid.table, self.sums.partials),
                lambda: dict(DTYPE=self.dtype, ALIGNED=self.grads_aligned, CHUNK=BLOCKS * BLOCK, BLOCK=BLOCK),
                warps=self.grid.warps,
                key=self.grads_aligned,
            )
        self.sums.add_up(self.compiled, 0)
        return self.sums.totals[0]
