"""Which tiles, or which library call, serve which product: a table of what was measured on an H200."""

from __future__ import annotations

from typing import NamedTuple


class Tiling(NamedTuple):
    """How a product is cut into tiles."""

    #: Rows of a tile, and columns of the squares it is written in.
    side: int
    #: Squares side by side in a tile: one or two.
    halves: int
    #: How far along the sum one round of a tile goes.
    depth: int
    warps: int
    stages: int
    #: Programs for each multiprocessor, which take tiles in turns.
    resident: int

    def count_tiles(self, rows: int, columns: int, *, symmetric: bool) -> int:
        """How many tiles a matrix of this size has."""
        high, wide = -(-rows // self.side), -(-columns // (self.side * self.halves))
        return sum(row // self.halves + 1 for row in range(high)) if symmetric else high * wide


LARGE = Tiling(128, 2, 64, 8, 3, 1)
SMALL = Tiling(128, 1, 32, 4, 4, 2)
#: Of float32, in TF32.
ROUNDED_LARGE = Tiling(128, 2, 32, 8, 3, 1)
ROUNDED_SMALL = Tiling(128, 1, 32, 8, 4, 1)
#: Of float32, in three products of TF32: where there are tiles for all of a GPU, and where there are few.
FULL, FULL_SMALL = Tiling(128, 1, 32, 8, 3, 1), Tiling(64, 1, 32, 4, 3, 2)


def choose_tiling(
    processors: int, digits: str, count: int, rows: int, columns: int, *, symmetric: bool, more: bool
) -> Tiling | None:
    """The tiles of products of rows x columns; None: the library is faster, or alone can do it.

    processors: multiprocessors of a GPU that fetches tiles by itself, as Hopper's do; 0: it does not. digits: the
    dtype, or of float32 "tf32" or "tf32x3".
    more: something is added to products, or they are converted, for which the library goes over them once more. It wins
    where there is nothing more and all of a product is needed.
    """
    least = min(rows, columns)
    smallest = {"bfloat16": 512, "float16": 512, "tf32": 768, "tf32x3": 256}
    if not processors or digits not in smallest or least < smallest[digits]:
        return None
    if not more and not symmetric and digits != "tf32x3":
        return None
    if digits == "tf32x3":
        is_full = count * FULL.count_tiles(rows, columns, symmetric=symmetric) >= processors
        tiling = FULL if is_full else FULL_SMALL
    elif digits == "tf32":
        tiling = ROUNDED_SMALL if symmetric and least < 2048 else ROUNDED_LARGE
    else:
        tiling = LARGE if symmetric and least >= 1024 else SMALL
    is_filled = 2 * count * tiling.count_tiles(rows, columns, symmetric=symmetric) >= processors
    return tiling if is_filled else None
