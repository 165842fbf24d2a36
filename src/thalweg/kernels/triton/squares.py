"""Sums of squares of many gradients, wherever they are: one launch, and one that adds up."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

from thalweg.kernels.triton.passes import dtype_of
from thalweg.kernels.triton.rows import Tensor, loaded, pointer
from thalweg.kernels.triton.stages import BLOCK, WARPS
from thalweg.kernels.triton.tables import add_up, are_aligned, enumerate_pieces

#: Elements that one program adds up.
CHUNK = 4 * BLOCK


@triton.jit
def squares_kernel(
    sizes,
    gradients,
    chunks,
    partials,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum of squares of one chunk of a gradient."""
    chunk = tl.program_id(0)
    row, first = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1).to(tl.int64) * CHUNK
    place, left = pointer(tl.load(gradients + row), DTYPE, ALIGNED) + first, tl.load(sizes + row) - first
    total = tl.zeros((BLOCK,), tl.float32)
    if left >= CHUNK:
        for part in tl.static_range(CHUNK // BLOCK):
            x = loaded(place + part * BLOCK + tl.arange(0, BLOCK), None)
            total += x * x
    else:
        for part in tl.static_range(CHUNK // BLOCK):
            index = part * BLOCK + tl.arange(0, BLOCK)
            x = loaded(place + index, index < left)
            total += x * x
    tl.store(partials + chunk, tl.sum(total))


class GradientSquares:
    """Gradients of one dtype, in a table of addresses."""

    def __init__(self, sizes: Sequence[int], dtype: Any, uploads: Any, compiled: Any) -> None:
        """sizes: elements of each."""
        self.count, self.dtype, self.compiled = len(sizes), dtype_of(dtype), compiled
        pieces = [-(-size // CHUNK) for size in sizes]
        self.sizes = uploads.table(array("q", sizes))
        self.chunks = uploads.table(enumerate_pieces(pieces), 2)
        self.begins = uploads.table(array("i", itertools.accumulate(pieces, initial=0)))
        self.partials, self.totals = uploads.empty((1, sum(pieces))), uploads.empty((self.count, 1))
        self.uploads, self.grads_aligned = uploads, True
        #: Addresses on the device.
        self.gradients: Tensor = None
        self.grad_places = array("Q")

    def follow(self, places: array[int]) -> None:
        """Note where the gradients are now."""
        is_known = places == self.grad_places and not self.uploads.captured and not self.uploads.is_capturing()
        if is_known:
            return
        self.grad_places, self.grads_aligned = places, are_aligned(places)
        if self.gradients is None:
            self.gradients = self.uploads.empty((self.count,), "int64")
        self.uploads.refill(self.gradients, places.tolist())

    def measure(self) -> Tensor:
        """The sum of squares of each."""
        chunks = self.partials.shape[1]
        if chunks:
            self.compiled.run(
                squares_kernel,
                (chunks,),
                (self.sizes, self.gradients, self.chunks, self.partials),
                lambda: dict(DTYPE=self.dtype, ALIGNED=self.grads_aligned, CHUNK=CHUNK, BLOCK=BLOCK),
                warps=WARPS,
                key=self.grads_aligned,
            )
        add_up(self.compiled, self.partials, self.begins, self.totals)
        return self.totals[:, 0]
