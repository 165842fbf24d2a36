"""Products of stacks of matrices (k, m, n) on GPUs: by a kernel where it is faster, else by the library.

Operands may lie in memory by rows or, as ``x.mT`` does, by columns. Sums within products are of float32.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from thalweg.kernels.products.choices import Tiling, choose_tiling
from thalweg.spaces.torch import by_rows
from thalweg.spaces.torch_products import in_precision


@functools.cache
def count_processors(device: torch.device) -> int:
    """How many multiprocessors a GPU has that fetches tiles by itself, as Hopper's do; 0: it does not."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    try:
        from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: F401
    except ImportError:  # Triton before 3.4
        return 0
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count if properties.major >= 9 else 0


def allows_tf32() -> bool:
    """Whether the user lets products of float32 be computed in TF32, as ``torch.set_float32_matmul_precision`` says."""
    matmul = torch.backends.cuda.matmul
    try:
        return bool(matmul.fp32_precision == "tf32")
    except AttributeError:  # torch before 2.9
        return bool(matmul.allow_tf32)


def multiply(
    a: Tensor,
    b: Tensor,
    plus: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    symmetric: bool = False,
    precision: str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """alpha a b + beta plus for each matrix.

    symmetric: the product and what is added to it are known to be symmetric, so that one half need not be computed.
    precision: of float32, "float32" or "tf32"; None: as the user's switch says. dtype: of the result; None: that of the
    operands.
    """
    count, rows, columns, dtype = a.shape[0], a.shape[1], b.shape[2], dtype or a.dtype
    more = plus is not None or dtype != a.dtype
    digits = str(a.dtype).removeprefix("torch.")
    if a.dtype == torch.float32:
        digits = "tf32" if precision == "tf32" or (precision is None and allows_tf32()) else "tf32x3"
    tiling = choose_tiling(count_processors(a.device), digits, count, rows, columns, symmetric=symmetric, more=more)
    if tiling is not None:
        operands = lay_out(a, b) if a.dtype == torch.float32 else (a, b)
        if can_describe(*operands, plus):
            form: dict[str, Any] = dict(symmetric=symmetric, digits=digits, dtype=dtype)
            return multiply_tiles(*operands, plus, tiling, alpha=alpha, beta=beta, **form)
    with in_precision(precision, a):
        if plus is not None:
            return torch.baddbmm(plus, a, b, beta=beta, alpha=alpha).to(dtype)
        product = torch.bmm(a, b)
    return (product if alpha == 1 else alpha * product).to(dtype)


def lay_out(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The operands with lines along which they are summed: tensor cores take float32 from no others."""
    is_transpose = a.data_ptr() == b.data_ptr() and a.shape == b.mT.shape and a.stride() == b.mT.stride()
    a = turn_by_kernel(a)
    return a, a.mT if is_transpose else turn_by_kernel(b.mT).mT


def turn_by_kernel(x: Tensor) -> Tensor:
    """The same matrices with rows as lines in memory; torch's copy of turned ones takes up to four times as long."""
    if x.stride(2) == 1:
        return x
    if not is_turned(x) or not x.is_cuda:
        return by_rows(x)
    from thalweg.kernels.products.kernel import turn_kernel

    (count, rows, columns), side = x.shape, 64
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid = -(-rows // side) * -(-columns // side), count
    turn_kernel[grid](x, out, rows, columns, x.stride(0), x.stride(2), SIDE=side)
    return out


def is_turned(x: Tensor) -> bool:
    """Whether columns lie in memory as rows."""
    return x.stride(2) != 1 and x.stride(1) == 1


def can_describe(a: Tensor, b: Tensor, plus: Tensor | None) -> bool:
    """Whether the GPU can fetch tiles by itself: lines, of results too, begin at multiples of 16 bytes.

    Tensor cores take float32 only from lines along which it is summed.
    """
    if a.element_size() == 4 and (is_turned(a) or not is_turned(b)):
        return False
    if (plus is not None and plus.stride(2) != 1) or 1 not in a.stride()[1:] or 1 not in b.stride()[1:]:
        return False
    operands = [x.mT if is_turned(x) else x for x in (a, b, plus) if x is not None]
    lengths = [x.element_size() * step for x in operands for step in x.stride()[:2]]
    return all(n % 16 == 0 for n in (*lengths, b.shape[2] * b.element_size(), *(x.data_ptr() for x in operands)))


def multiply_tiles(
    a: Tensor,
    b: Tensor,
    plus: Tensor | None,
    tiling: Tiling,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    symmetric: bool = False,
    digits: str = "tf32",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``multiply`` by the kernel. Stacks that can be described, and so results. digits: of float32."""
    from thalweg.kernels.products.kernel import product_kernel

    (count, rows, depth), columns = a.shape, b.shape[2]
    out = torch.empty((count, rows, columns), dtype=dtype or a.dtype, device=a.device)
    side, wide, deep = tiling.side, tiling.side * tiling.halves, tiling.depth
    total = count * tiling.count_tiles(rows, columns, symmetric=symmetric)
    programs = min(total, max(1, count_processors(a.device)) * tiling.resident)
    if programs:
        written = describe(out, side, side)
        product_kernel[(programs,)](
            describe(a, side, deep),
            describe(b, deep, wide),
            written if plus is None else describe(plus, side, side),
            written,
            count,
            rows,
            columns,
            depth,
            alpha,
            beta,
            A_TURNED=is_turned(a),
            B_TURNED=is_turned(b),
            ADDS=plus is not None,
            SYMMETRIC=symmetric,
            SIDE=side,
            HALVES=tiling.halves,
            BK=deep,
            DIGITS="tf32x3" if digits == "tf32x3" else "tf32",
            num_warps=tiling.warps,
            num_stages=tiling.stages,
        )
    return out


def describe(x: Tensor, high: int, wide: int) -> Any:
    """How the GPU fetches tiles of a stack by itself."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    if is_turned(x):
        x, high, wide = x.mT, wide, high
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, high, wide])
