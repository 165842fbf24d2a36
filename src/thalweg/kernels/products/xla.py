"""Products of stacks of matrices inside programs of XLA, by the kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from thalweg.arrays import Shape
from thalweg.kernels.products.choices import Tiling
from thalweg.kernels.products.kernel import product_kernel
from thalweg.kernels.triton.xla import DTYPES, NUMBER, WARP, Launched, argument_of

#: What the driver calls dtypes of elements that a GPU fetches by itself.
FETCHED = {"float16": 6, "bfloat16": 9}


def launch_product(
    compiled: Callable[..., Any],
    stacks: Sequence[tuple[Shape, str]],
    turned: tuple[bool, bool],
    factors: tuple[float, float],
    tiling: Tiling,
    processors: int,
    *,
    symmetric: bool,
) -> Launched:
    """alpha a b + beta plus. stacks: shapes and dtypes in memory of a, b, plus if there is one, and the result.

    turned: whether a and b are the transposes of what is in memory. factors: alpha and beta.
    """
    side, wide, deep = tiling.side, tiling.side * tiling.halves, tiling.depth
    blocks = [(side, deep), (deep, wide), *[(side, side)] * (len(stacks) - 2)]
    blocks[:2] = (block[::-1] if is_turned else block for block, is_turned in zip(blocks, turned, strict=False))
    adds, (count, rows, columns) = len(stacks) == 4, stacks[-1][0]
    depth = stacks[0][0][1 if turned[0] else 2]
    buffers = [0, 1, 2 if adds else len(stacks) - 1, len(stacks) - 1]
    kinds = {
        name: (f"tensordesc<{DTYPES[stacks[i][1]][1]}[1, {blocks[i][0]}, {blocks[i][1]}]>", False)
        for name, i in zip(("a", "b", "plus", "out"), buffers, strict=True)
    }
    sizes = {"rows": rows, "columns": columns, "depth": depth}
    kinds |= {"count": ("i32", False), **{name: ("i32", size % 16 == 0) for name, size in sizes.items()}}
    kinds |= {"alpha": ("fp32", False), "beta": ("fp32", False)}
    constants: dict[str, Any] = dict(A_TURNED=turned[0], B_TURNED=turned[1], ADDS=adds, SYMMETRIC=symmetric)
    constants |= dict(SIDE=side, HALVES=tiling.halves, BK=deep, DIGITS="tf32")
    kernel = compiled(product_kernel, kinds, constants, tiling.warps, tiling.stages)
    arguments: list[Any] = []
    for i, how in zip(buffers, kernel.metadata.tensordesc_meta, strict=True):
        shape, dtype = stacks[i]
        fetched = FETCHED[dtype], DTYPES[dtype][0], how["swizzle"], *shape[::-1], *how["block_size"][::-1]
        strides = shape[1] * shape[2], shape[2], 1
        arguments += [(i, 0, fetched), *((NUMBER, size) for size in (*shape, *strides))]
    arguments += map(argument_of, (count, *sizes.values(), *map(float, factors)))
    programs = min(count * tiling.count_tiles(rows, columns, symmetric=symmetric), processors * tiling.resident)
    return Launched(kernel, WARP * tiling.warps, (programs, 1, 1), arguments)
