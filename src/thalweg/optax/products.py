"""Products of stacks of matrices on GPUs, inside XLA's programs.

Of 16-bit matrices: by kernels, where they are faster than XLA's own. They add and round where XLA would go over a
product once more, and make one half of a symmetric one. Of float32: by cuBLAS, so that XLA does not search for each
one's best kernel, which is most of the time that programs of Kron take to compile.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax

from thalweg.arrays import is_number
from thalweg.kernels.products.choices import Tiling, choose_tiling
from thalweg.optax.native import gpu
from thalweg.optax.native.choice import either
from thalweg.optax.native.moves import stack_all, take_apart
from thalweg.spaces import jax as space

HIGHEST = jax.lax.Precision.HIGHEST
#: Bytes of scratch for cuBLAS, as many as XLA gives it.
WORKSPACE = 2**25


@functools.cache
def count_processors() -> int:
    """How many multiprocessors the GPU has, 0: there is none for which these kernels are."""
    if jax.default_backend() != "gpu" or isinstance(gpu.handler(), str) or gpu.capability() < 90:
        return 0
    return int(getattr(jax.local_devices()[0], "core_count", 0))


def space_for(engine: str) -> Any:
    """What whole tensors are computed with."""
    return Products() if engine != "xla" and count_processors() else space


def asked_precision() -> Any:
    """Of products of float32; None: an algorithm that XLA alone has."""
    asked = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    try:
        return HIGHEST if asked is None else jax.lax.Precision(asked)
    except ValueError:
        return None


def is_for_library(x: Any, y: Any) -> bool:
    """Whether two stacks are float32 matrices, and no vectors, whose products are sums to XLA."""
    is_stack = x.ndim == 3 and x.shape[0] == y.shape[0] and x.size > 0 and min(x.shape[1], y.shape[2]) > 1
    is_known = x.dtype == y.dtype == "float32" and asked_precision() is not None
    return is_stack and is_known and bool(gpu.handler().thalweg_multiplies())


def choose(native: Any, xla: Any, *args: Any) -> Any:
    return either(native, xla, *args, platform="cuda", is_required=False, is_local=False)


class Products:
    """jax's functions, but for products, and for stacks: XLA would compile a kernel for each of their members."""

    def __init__(self, plain: Any = space) -> None:
        """plain: the space whose products XLA makes where no kernel is faster."""
        self.plain = plain
        #: By the id of a transpose: itself, so that it lives, and of what it is one.
        self.turned: dict[int, tuple[Any, Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(space, name)

    def in_precision(self, precision: str) -> Products:
        return Products(space.in_precision(precision))

    def swapaxes(self, x: Any, first: int, second: int) -> Any:
        if x.ndim != 3 or {first % 3, second % 3} != {1, 2}:
            return space.swapaxes(x, first, second)
        if id(x) in self.turned:
            return self.turned[id(x)][1]
        transpose = space.swapaxes(x, 1, 2)
        self.turned[id(transpose)] = transpose, x
        return transpose

    def stack_all(self, lists: Sequence[Sequence[Any]]) -> list[Any]:
        return list(choose(functools.partial(stack_all, gpu.move), space.stack_all, lists)) if lists else []

    def take_apart(self, stacks: Sequence[Any]) -> list[Sequence[Any]]:
        return list(choose(functools.partial(take_apart, gpu.move), space.take_apart, stacks)) if stacks else []

    def matmul(self, x: Any, y: Any) -> Any:
        return self.multiply(x, y, dtype=x.dtype.name)

    def matmul_rounded(self, x: Any, y: Any, dtype: str) -> Any:
        return self.multiply(x, y, dtype=dtype)

    def matmul_symmetric(self, x: Any, y: Any) -> Any:
        return self.multiply(x, y, dtype=x.dtype.name, symmetric=True)

    def matmul_add(self, x: Any, y: Any, z: Any, product: float, plus: float, *, symmetric: bool = False) -> Any:
        return self.multiply(x, y, z, dtype=x.dtype.name, alpha=product, beta=plus, symmetric=symmetric)

    def matmul_add_symmetric(self, x: Any, y: Any, z: Any, product: float, plus: float) -> Any:
        return self.matmul_add(x, y, z, product, plus, symmetric=True)

    def multiply(
        self, x: Any, y: Any, *z: Any, dtype: str, alpha: float = 1.0, beta: float = 1.0, symmetric: bool = False
    ) -> Any:
        def by_xla(a: Any, b: Any, *z: Any) -> Any:
            pairs = zip((a, b), turned, strict=True)
            a, b = (space.swapaxes(matrix, 1, 2) if is_turned else matrix for matrix, is_turned in pairs)
            return self.plain.matmul_add(a, b, z[0], alpha, beta) if z else self.plain.matmul_rounded(a, b, dtype)

        def by_kernel(*operands: Any, tiling: Tiling) -> Any:
            from thalweg.kernels.products.xla import launch_product
            from thalweg.kernels.triton.xla import TARGET, compile_for, register

            stacks = [*((operand.shape, operand.dtype.name) for operand in operands), (shape, dtype)]
            compiled = functools.partial(compile_for, gpu.capability())
            launch = launch_product(compiled, stacks, turned, (alpha, beta), tiling, processors, symmetric=symmetric)
            key = register(gpu.handler(), [launch], len(operands))
            return jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct(shape, dtype))(*operands, key=key)

        def by_library(*operands: Any) -> Any:
            from thalweg.kernels.triton.xla import MULTIPLY

            results = [jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct((WORKSPACE,), "uint8")]
            form = "".join("NT"[is_turned] for is_turned in turned) + ("F" if asked_precision() == HIGHEST else "T")
            return jax.ffi.ffi_call(MULTIPLY, results)(*operands, form=form)[0]

        turned = id(x) in self.turned, id(y) in self.turned
        a, b = (self.turned.get(id(matrix), (matrix, matrix))[1] for matrix in (x, y))
        shape, processors, tiling = (*x.shape[:-1], y.shape[-1]), count_processors(), None
        is_aligned = all(matrix.shape[-1] % 8 == 0 for matrix in (a, b, y))
        if x.ndim == 3 and is_aligned and is_number(alpha) and is_number(beta):
            more = bool(z) or dtype != x.dtype
            tiling = choose_tiling(processors, x.dtype.name, *shape, symmetric=symmetric, more=more)
        native: Any = by_library
        if tiling is not None:
            native = functools.partial(by_kernel, tiling=tiling)
        elif z or dtype != "float32" or not is_for_library(x, y):
            return by_xla(a, b, *z)
        return choose(native, by_xla, a, b, *z)
