"""Sums over millions of elements of float32, in every space: as exact on one processor as on another."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from day import BY_DAY
from tolerances import FLOAT32, SUMMED

from thalweg.arrays import Squares

SIZE = 2**20
#: Squares, long and short axes, a size that is no power of two, and one that pieces and rows do not divide.
SHAPES = [(SIZE,), (1024, 1024), (2**18, 4), (4, 2**18), (1999, 503), (3641, 288), (32, 512, 4, 4)]


def positive(shape: tuple[int, ...]) -> Any:
    """Numbers that do not cancel: then an error is one of summing."""
    return np.random.default_rng(0).random(shape, dtype="float32")


def given_to(space: str, x: Any) -> tuple[Any, Any, Callable[[Any], Any]]:
    """A space, an array of its own with the numbers of x, and what makes its results arrays of numpy."""
    if space == "numpy":
        from thalweg.spaces import numpy

        return numpy, x, np.asarray
    if space == "jax":
        jnp = pytest.importorskip("jax.numpy")
        from thalweg.spaces import jax

        return jax, jnp.asarray(x), np.asarray
    torch = pytest.importorskip("torch")
    from thalweg.spaces import foreach, sharded
    from thalweg.spaces import torch as plain

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of memory that must not be written to
        tensor = torch.from_numpy(x)
    if space == "torch":
        return plain, tensor, np.asarray
    beside = foreach.TensorList([tensor, -tensor])  # another that must not matter

    def first(found: Any) -> Any:
        return np.asarray(found.values[0] if isinstance(found, foreach.PerTensor) else found.tensors[0])

    part = sharded.Part(tuple(x.shape), (0,) * x.ndim, ((),) * x.ndim)
    return foreach if space == "foreach" else sharded.Sharded([part, part]), beside, first


pytestmark = pytest.mark.slow  # sums are of millions
SPACES = ["numpy", "torch", "foreach", "sharded", "jax"]
every_space = pytest.mark.parametrize("space", SPACES)


def axes_of(ndim: int) -> list[tuple[int, ...] | None]:
    single = [(axis,) for axis in range(ndim)] if ndim > 1 else []
    return [None, *single, *([(1, 2), (0, 2), (1, 2, 3)[: ndim - 1]] if ndim > 2 else [])]


def exact(x: Any) -> Any:
    """Means over several axes, of x and of its squares, in float64: no error of theirs could be seen here."""
    wide = x.astype("float64")
    kinds = (("x", wide), ("squares", wide * wide))
    return {(kind, axes): y.mean(axis=axes, keepdims=axes is not None) for kind, y in kinds for axes in axes_of(x.ndim)}


@cache
def exact_of(shape: tuple[int, ...]) -> Any:
    return exact(positive(shape))


def check(x: Any, means: Any, xp: Any, given: Any, back: Callable[[Any], Any]) -> None:
    for (kind, axes), mean in means.items():
        term = Squares(given, axes) if kind == "squares" else (given, axes)
        for name, (found,), expected in (
            ("sum", xp.sums(term), mean * (x.size // mean.size)),
            ("mean", xp.means(term), mean),
        ):
            figures = back(found)
            assert figures.shape == expected.shape
            error = np.max(np.abs(figures.astype("float64") / expected - 1))
            assert error < SUMMED, f"the {name} of {kind} over {axes} of {x.shape} is off by {error:.2g}"


@every_space
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_and_means_of_millions(space: str, shape: tuple[int, ...]) -> None:
    x = positive(shape)
    check(x, exact_of(shape), *given_to(space, x))


@pytest.mark.parametrize("space", SPACES[:-1])  # those whose arrays have strides
def test_arrays_that_do_not_lie_row_by_row_in_memory(space: str) -> None:
    """Transposed, with gaps, with the same memory for every row, and the channels of an image last."""
    for x in (
        positive((1024, 1024)).T,
        positive((1000, 1024))[:, :700],
        np.broadcast_to(positive((1, 1500)), (700, 1500)),
        positive((32, 32, 32, 32)).transpose(0, 3, 1, 2),
    ):
        check(x, exact(x), *given_to(space, x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own use of torch.jit
@pytest.mark.skipif(BY_DAY, reason="a compiler takes a minute: make test-all has it")
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch compiles with a C++ compiler, and there is none here")
def test_sums_and_means_by_compiled_torch() -> None:
    """A compiler makes its own loops."""
    torch = pytest.importorskip("torch")
    from thalweg.spaces import torch as xp

    compiled = SimpleNamespace(**{name: torch.compile(getattr(xp, name), fullgraph=True) for name in ("sums", "means")})
    x = positive((2048, 2048))
    check(x, exact(x), compiled, torch.from_numpy(x), np.asarray)


@every_space
def test_the_largest_column_is_the_largest(space: str) -> None:
    """Where thousands of rows add up, and one column is larger than the others by little more than rounding."""
    x = np.sqrt(positive((8192, 64)) + 0.5)
    x *= np.sqrt(8192 / (x.astype("float64") ** 2).sum(axis=0)).astype("float32")
    x[:, 37] *= np.float32(1 + 5e-7)
    assert (x.astype("float64") ** 2).sum(axis=0).argmax() == 37
    xp, given, back = given_to(space, x)
    assert np.array_equal(back(xp.largest_column(given)), x[:, 37:38])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_joint_norm_of_gradients(dtype: str) -> None:
    """A step along gradients of a joint norm of 1 has that norm."""
    torch = pytest.importorskip("torch")
    import thalweg.torch

    params = [torch.nn.Parameter(torch.zeros(size)) for size in (SIZE, 3)]
    for p in params:
        p.grad = torch.from_numpy(positive(tuple(p.shape))).to(getattr(torch, dtype)).float()
    wanted = sum(float((p.grad.double() ** 2).sum()) for p in params) ** 0.5
    thalweg.torch.SGD(params, lr=1.0, max_grad_norm=1.0).step()
    for p in params:
        assert torch.allclose(p.double(), -p.grad.double() / wanted, rtol=SUMMED, atol=0)


def test_torch_makes_no_wide_copy() -> None:
    """A copy in float64 would be twice the size of x."""
    torch = pytest.importorskip("torch")
    from measured_peaks import allocator_peak

    from thalweg.spaces import torch as xp

    x = torch.from_numpy(positive((1024, 2048)))
    for given in (x, x.transpose(0, -1), x.reshape(-1)):
        for axes in axes_of(given.ndim):
            for term in ((given, axes), Squares(given, axes)):
                (result,) = xp.sums(term)
                needed = allocator_peak(lambda term=term: xp.sums(term), warm_up=1)  # type: ignore[misc]
                assert needed <= 3 * result.nbytes + 2**20, axes


@pytest.mark.parametrize("size", [100, 5000, SIZE])
def test_torch_keeps_the_range_of_float32(size: int) -> None:
    """Squares that float32 cannot hold are infinite or 0, and what is no number stays so; float64 is float64."""
    torch = pytest.importorskip("torch")
    from thalweg.spaces import torch as xp

    for axes, shape in ((None, (size,)), ((1,), (1, size)), ((0,), (size, 1))):

        def squares(x: Any, axes: Any = axes, shape: Any = shape) -> Any:
            (found,) = xp.sums(Squares(x.reshape(shape), axes))
            assert found.dtype == x.dtype
            return found.item()

        x = torch.ones(size)
        assert squares(x * 1e20) == np.inf
        assert squares(x * (3e38 / size) ** 0.5) == pytest.approx(3e38, rel=FLOAT32)
        assert squares(x * (5e38 / size) ** 0.5) == np.inf
        assert squares(x * 1e-30) == 0
        assert squares(x.double() * 1e20) == pytest.approx(size * 1e40, rel=FLOAT32)
        x[size // 2] = np.nan
        assert np.isnan(squares(x))
