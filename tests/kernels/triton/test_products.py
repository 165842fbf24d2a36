"""Products of stacks of matrices against float64: interpreted on the CPU, or on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from on_device import DEVICE
from tolerances import STACK_PRODUCTS

pytest.importorskip("triton.tools.tensor_descriptor")

from thalweg.kernels.products import stacks
from thalweg.kernels.products.choices import LARGE, ROUNDED_LARGE, ROUNDED_SMALL, SMALL, Tiling

#: Small: every program is interpreted.
SQUARE = Tiling(side=16, halves=1, depth=16, warps=4, stages=2, resident=2)
WIDE = Tiling(side=16, halves=2, depth=16, warps=4, stages=2, resident=1)
#: Rows and depth: whole tiles, and parts of tiles.
SIZES = [(32, 48), (40, 24)]


def draw(*shape: int, dtype: str = "bfloat16", seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed + 7 * sum(shape))
    return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(getattr(torch, dtype)).to(DEVICE)


def turn(x: Any) -> Any:
    """The same matrices, with columns in memory as rows."""
    return x.mT.contiguous().mT


def multiply(a: Any, b: Any, plus: Any, alpha: float, beta: float) -> Any:
    """In float64."""
    product = alpha * (a.double() @ b.double())
    return product if plus is None else product + beta * plus.double()


def assert_near(found: Any, expected: Any, *, rounded: bool = False) -> None:
    """rounded: the operands were float32, and a GPU has rounded them to TF32."""
    assert found.shape == expected.shape
    is_tf32 = rounded and found.dtype == torch.float32 and DEVICE != "cpu"
    tolerance = STACK_PRODUCTS["tf32" if is_tf32 else str(found.dtype).removeprefix("torch.")]
    assert (found.double() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.fixture
def precision() -> Iterator[Callable[[str], None]]:
    """Sets what products of float32 may be rounded to; afterwards it is as before."""
    before = torch.get_float32_matmul_precision()
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


@pytest.mark.slow  # programs are interpreted
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(
    ("dtype", "tiling"), [("bfloat16", WIDE), ("float16", SQUARE), ("float32", WIDE)], ids=lambda x: str(x)[:8]
)
def test_symmetric_products(size: tuple[int, int], dtype: str, tiling: Tiling) -> None:
    m, n = size
    x, d = draw(2, m, n, dtype=dtype), draw(2, m, m, dtype=dtype)
    for a, plus in ((x, d + d.mT), *([(turn(x), None)] if dtype != "float32" else [])):
        found = stacks.multiply_tiles(a, a.mT, plus, tiling, alpha=0.5, beta=-2.0, symmetric=True)
        assert_near(found, multiply(a, a.mT, plus, 0.5, -2.0), rounded=True)
        assert torch.equal(found, found.mT)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(("dtype", "tiling"), [("bfloat16", WIDE), ("float16", SQUARE)], ids=lambda x: str(x)[:8])
def test_products(size: tuple[int, int], dtype: str, tiling: Tiling) -> None:
    m, k = size
    a, b, plus = draw(2, m, k, dtype=dtype), draw(2, k, 40, dtype=dtype), draw(2, m, 40, dtype=dtype)
    before = [x.clone() for x in (a, b, plus)]
    for left, right, added in ((a, b, plus), (turn(a), turn(b), plus), (a, turn(b), None)):
        found = stacks.multiply_tiles(left, right, added, tiling, alpha=0.5, beta=2.0)
        assert_near(found, multiply(left, right, added, 0.5, 2.0))
    other = torch.float16 if dtype == "bfloat16" else torch.bfloat16
    assert_near(stacks.multiply_tiles(a, b, None, tiling, dtype=other), multiply(a, b, None, 1.0, 0.0))
    assert all(map(torch.equal, (a, b, plus), before)), "operands were written"


def test_a_stack_of_nothing() -> None:
    assert stacks.multiply_tiles(draw(0, 24, 24), draw(0, 24, 24), None, WIDE).shape == (0, 24, 24)


def test_what_cannot_be_described() -> None:
    """Lines that do not begin at multiples of 16 bytes, and stacks with gaps between all elements."""
    x = draw(2, 24, 48)
    assert stacks.can_describe(x, x.mT, draw(2, 24, 24))
    assert not stacks.can_describe(x[:, :, 1:], x.mT[:, 1:], None)
    assert not stacks.can_describe(x[:, :, ::2], x.mT[:, ::2], None)
    assert not stacks.can_describe(x, x.mT, turn(draw(2, 24, 24)))
    assert not stacks.can_describe(draw(2, 24, 8), draw(2, 8, 20), None)
    x = draw(2, 24, 48, dtype="float32")  # which is only multiplied along lines
    assert stacks.can_describe(x, x.mT, None)
    assert not stacks.can_describe(x.mT, x, None)
    assert not stacks.can_describe(draw(2, 24, 24, dtype="float32"), x, None)


def test_float32_is_rounded_only_if_the_user_or_the_rule_allows_it(precision: Callable[[str], None]) -> None:
    x, r = draw(4, 1024, 256, dtype="float32"), draw(4, 1024, 1024, dtype="float32")
    r = r + r.mT
    for switch, asked in (("highest", None), ("high", None), ("high", "float32"), ("highest", "tf32")):
        precision(switch)
        assert stacks.allows_tf32() == (switch == "high")
        is_rounded = (asked or {"high": "tf32"}.get(switch)) == "tf32"
        for a, b, plus in ((x, x.mT, None), (r, r, r)):
            found = stacks.multiply(a, b, plus, symmetric=True, precision=asked)
            assert_near(found, multiply(a, b, plus, 1.0, 1.0), rounded=is_rounded)


@pytest.mark.skipif(DEVICE == "cpu", reason="matrices that are too large to be interpreted")
@pytest.mark.parametrize(("m", "n", "k"), [(768, 3072, 768), (520, 1096, 264), (2048, 512, 2048)])
def test_products_of_float32_are_as_exact_as_the_library(m: int, n: int, k: int) -> None:
    """And so are the sums of squares of large matrices, whose errors would all have one sign if sums were cut off."""
    if not stacks.count_processors(torch.device(DEVICE)):
        pytest.skip("the library makes them")
    a, b = draw(3, m, k, dtype="float32"), draw(3, k, n, dtype="float32")
    for left, right, is_symmetric in ((a, b, False), (turn(a), turn(b), False), (a.abs(), a.abs().mT, True)):
        expected = left.double() @ right.double()
        found = stacks.multiply(left, right, symmetric=is_symmetric, precision="float32")
        error = (found.double() - expected).square().mean().sqrt()
        assert error <= (torch.bmm(left, right).double() - expected).square().mean().sqrt()


@pytest.mark.skipif(DEVICE == "cpu", reason="matrices that are too large to be interpreted")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("tiling", [LARGE, SMALL], ids=["large", "small"])
@pytest.mark.parametrize(("m", "n"), [(768, 3072), (520, 1096), (200, 72), (2048, 2048)])
def test_large_products(dtype: str, tiling: Tiling, m: int, n: int) -> None:
    """With the tiles that are used on GPUs, whose operands are fetched ahead."""
    x, q = draw(3, m, n, dtype=dtype), draw(3, m, m, dtype=dtype)
    plus, turned = q + q.mT, x.mT.contiguous()
    assert_near(stacks.multiply_tiles(x, x.mT, plus, tiling, symmetric=True), multiply(x, x.mT, plus, 1.0, 1.0))
    assert_near(stacks.multiply_tiles(turned.mT, turned, None, tiling, symmetric=True), multiply(x, x.mT, None, 1, 0))
    for a, b, added in ((q, x, x), (turned, q, turned)):
        found = stacks.multiply_tiles(a, b, added, tiling, alpha=2.0, beta=0.5)
        assert_near(found, multiply(a, b, added, 2.0, 0.5))


@pytest.mark.skipif(DEVICE == "cpu", reason="matrices that are too large to be interpreted")
@pytest.mark.parametrize("tiling", [ROUNDED_LARGE, ROUNDED_SMALL], ids=["large", "small"])
@pytest.mark.parametrize(("m", "n"), [(520, 1096), (2048, 2048)])
def test_large_products_in_tf32(tiling: Tiling, m: int, n: int) -> None:
    x, q = draw(3, m, n, dtype="float32"), draw(3, m, m, dtype="float32")
    plus = q + q.mT
    found = stacks.multiply_tiles(x, x.mT, plus, tiling, alpha=2.0, beta=0.5, symmetric=True)
    assert torch.equal(found, found.mT)
    assert_near(found, multiply(x, x.mT, plus, 2.0, 0.5), rounded=True)
    assert_near(stacks.multiply_tiles(q, turn(x), x, tiling), multiply(q, x, x, 1.0, 1.0), rounded=True)
