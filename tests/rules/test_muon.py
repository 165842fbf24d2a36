"""Muon: what tests/published does not have of its formulas, and how parameters are taken for matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from drive import gradients, run
from tolerances import FLOAT64

from thalweg.errors import ParameterError
from thalweg.numpy import Muon as Optimizer
from thalweg.rules import Muon

EXACT: dict[str, Any] = dict(ns_dtype=None)


def orthogonalized(x: Any, steps: int = 5, triple: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)) -> Any:
    """By the singular values, which the iteration moves one by one: no product of it is here."""
    left, values, right = np.linalg.svd(x / max(np.linalg.norm(x), 1e-7), full_matrices=False)
    a, b, c = triple
    for _ in range(steps):
        values = a * values + b * values**3 + c * values**5
    return left @ np.diag(values) @ right


def by_hand(p: Any, grads: list[Any], *, lr: float = 0.1, scale: float = 1.0) -> Any:
    buffer = np.zeros_like(p)
    for g in grads:
        buffer = 0.95 * buffer + 0.05 * g
        p = p - lr * scale * orthogonalized(0.95 * buffer + 0.05 * g)
    return p


def error(x: Any, wanted: Any, start: Any) -> float:
    return float(np.abs(x - wanted).max() / np.abs(wanted - start).max())


@pytest.mark.parametrize(
    ("options", "shape", "scale"),
    [
        (dict(scaling="spectral_unclamped"), (8, 2), 2.0),
        (dict(scaling="spectral_unclamped"), (2, 8), 0.5),
        (dict(scaling="spectral_unclamped", transposed=True), (2, 8), 2.0),
        (dict(scaling="match_rms_adamw", rms=0.5), (16, 3), 2.0),
        (dict(scaling=None), (8, 2), 1.0),
        (dict(transposed=True), (2, 8), 2.0),
        (dict(transposed=True), (8, 2), 1.0),
        (dict(transposed=True, scaling="match_rms_adamw"), (2, 25), 1.0),
        (dict(transposed=True, scaling="optax"), (2, 8), 2.0),
        (dict(transposed=True, scaling=None), (2, 8), 1.0),
    ],
)
def test_scalings(options: dict[str, Any], shape: tuple[int, int], scale: float) -> None:
    p, grads = gradients(shape, 2)
    got, _ = run(Muon(**EXACT, **options), p, grads, lr=0.1)
    assert error(got, by_hand(p, grads, scale=scale), p) < FLOAT64


def test_without_momentum_nothing_is_kept() -> None:
    p, grads = gradients((5, 3), 1)
    got, state = run(Muon(**EXACT, momentum=0.0, scaling=None), p, grads, lr=0.1)
    assert state == {}
    assert error(got, p - 0.1 * orthogonalized(grads[0]), p) < FLOAT64


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shape", [(6, 4), (4, 6)])
def test_rows_are_normalized_as_published(shape: tuple[int, int], axis: int) -> None:
    """NorMuon, as its authors write it; along axis 0 for weights that are stored as (in, out)."""
    p, grads = gradients(shape, 6)
    grads = [g * np.logspace(0, 3, shape[1 - axis]).reshape((-1, 1) if axis == 1 else (1, -1)) for g in grads]
    wanted, buffer, means = p, np.zeros_like(p), np.zeros(())
    for g in grads:
        buffer = 0.95 * buffer + 0.05 * g
        x = orthogonalized(0.95 * buffer + 0.05 * g)
        means = 0.95 * means + 0.05 * (x * x).mean(axis, keepdims=True)
        y = x / (np.sqrt(means) + 1e-8)
        scale = max(1.0, shape[1 - axis] / shape[axis]) ** 0.5 * np.linalg.norm(x) / (np.linalg.norm(y) + 1e-8)
        wanted = wanted - 0.1 * scale * y
    got, state = run(Muon(**EXACT, normalize="rows", transposed=axis == 0), p, grads, lr=0.1)
    assert error(got, wanted, p) < FLOAT64
    assert state["line_squares"].shape == (shape[1 - axis],)


def test_coefficients_by_step() -> None:
    cubic, quintic = (1.5, -0.5, 0.0), (3.0, -4.0, 2.0)
    p, grads = gradients((4, 6), 1)
    rule = Muon(**EXACT, ns_coefficients=(quintic, cubic), ns_steps=4, momentum=0.0)
    got, _ = run(rule, p, grads, lr=1.0)
    first = orthogonalized(grads[0], 1, quintic)
    left, values, right = np.linalg.svd(first, full_matrices=False)
    for _ in range(3):  # the last triple serves all steps that are left
        values = 1.5 * values - 0.5 * values**3
    assert error(got, p - left @ np.diag(values) @ right, p) < FLOAT64


@pytest.mark.parametrize(("name", "least", "most"), [("polar_express", 0.86, 1.13), ("quintic", 0.97, 1.04)])
def test_named_coefficients_move_singular_values_near_one(name: Any, least: float, most: float) -> None:
    """Those of at least 0.01, in five steps."""
    values = np.logspace(0, -2, 12)
    for a, b, c in Muon(ns_coefficients=name).triples[:5]:
        values = a * values + b * values**3 + c * values**5
    assert values.min() > least
    assert values.max() < most


# ---- how parameters are taken for matrices


#: Under a description: the shape, how it is cut into matrices, and the options that say so. Each matrix is stepped as
#: if it were a parameter by itself.
PARTS: dict[str, tuple[tuple[int, ...], Any, dict[str, Any]]] = {
    "blocks of rows": ((6, 4), lambda x: np.split(x, 3, 0), dict(split=3)),
    "wide blocks of rows": ((3, 9), lambda x: np.split(x, 3, 0), dict(split=3)),
    "blocks of columns": ((4, 6), lambda x: np.split(x, 3, 1), dict(split=3, split_axis=1)),
    "blocks of a convolution": ((2, 3, 2), lambda x: np.split(x.reshape(2, 6), 3, 1), dict(split=3, split_axis=1)),
    "equal sizes": ((6, 4), lambda x: np.split(x, 3, 0), dict(split=(2, 2, 2))),
    "queries, keys and values": ((12, 4), lambda x: np.split(x, [8, 10], 0), dict(split=(8, 2, 2))),
    "the same by columns": ((4, 12), lambda x: np.split(x, [8, 10], 1), dict(split=(8, 2, 2), split_axis=1)),
    "of a stack": (
        (2, 12, 3),
        lambda x: [part for own in x for part in np.split(own, [8, 10], 0)],
        dict(split=(8, 2, 2), stacked_axes=1),
    ),
    "of a stack, by columns": (
        (2, 3, 12),
        lambda x: [part for own in x for part in np.split(own, [8, 10], 1)],
        dict(split=(8, 2, 2), split_axis=1, stacked_axes=1),
    ),
    "kernels of convolutions": ((6, 2, 3, 3), lambda x: [x.reshape(6, 18)], {}),
    "a row": ((7,), lambda x: [x.reshape(1, 7)], dict(vectors="row")),
    "transposed": (
        (4, 12),
        lambda x: [part.T for part in np.split(x, [6, 10], 1)],
        dict(split=(6, 4, 2), split_axis=1, transposed=True),
    ),
}


@pytest.mark.parametrize("how", PARTS)
@pytest.mark.parametrize(
    "options", [{}, dict(scaling="match_rms_adamw"), dict(scaling=None), dict(normalize="rows")], ids=str
)
def test_matrices_of_a_parameter_are_stepped_by_themselves(how: str, options: dict[str, Any]) -> None:
    shape, cut, own = PARTS[how]
    p, grads = gradients(shape, 3)
    stepped, optimizer = p.copy(), Optimizer(lr=0.1, **EXACT, **own, **options)
    for g in grads:
        optimizer.update("w", stepped, g)
    assert optimizer.state["w"]["momentum_buffer"].shape == shape
    for part, found, *gradient in zip(*map(cut, [p, stepped, *grads]), strict=True):
        wanted, _ = run(Muon(**EXACT, **options), part, gradient, lr=0.1)
        assert error(found, wanted, part) < FLOAT64


def test_unequal_blocks_are_told() -> None:
    assert Muon(split=(8, 2, 2)).treatment((12, 4)) == "matrix 8 x 4, 2 matrices 2 x 4"
    optimizer = Optimizer(lr=0.1, split=(8, 2, 2))
    weights = np.ones((12, 4))
    optimizer.update("w", weights, np.random.default_rng(0).standard_normal((12, 4)))
    assert np.shape(optimizer.stats()["w"]["norm"]) == (3,)


@pytest.mark.parametrize(
    ("shape", "options", "said"),
    [
        ((), {}, r"parameter 'w' has shape \(\): it is no matrix, .* such as AdamW, or set vectors='row'"),
        ((7,), {}, r"parameter 'w' has shape \(7,\): it is no matrix"),
        ((3, 7), dict(stacked_axes=1), r"shape \(3, 7\): each of its tensors is no matrix"),
        ((4, 6), dict(split=3), r"shape \(4, 6\): as a matrix it has 4 rows, which split=3 does not divide"),
        ((3, 5), dict(split=3, split_axis=1), r"it has 5 columns, which split=3 does not divide"),
        ((4, 6), dict(split=(2, 1)), r"as a matrix it has 4 rows, and the sizes of split=\(2, 1\) add up to 3"),
        ((4, 6), dict(split=(4, 1), split_axis=1), r"it has 6 columns, and the sizes of split=\(4, 1\) add up to 5"),
    ],
)
def test_shapes_that_are_refused(shape: tuple[int, ...], options: dict[str, Any], said: str) -> None:
    optimizer = Optimizer(**options)
    with pytest.raises(ParameterError, match=said):
        optimizer.update("w", np.ones(shape), np.ones(shape))
    assert not optimizer.state


# ---- bfloat16


def test_numpy_rounds_as_bfloat16_does() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    from thalweg.spaces import numpy as xp

    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32) * np.logspace(-40, 38, 1000, dtype=np.float32)
    ties = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8, 0.0, np.inf, np.nan], np.float32)
    for values in (x, ties, ties.astype(np.float64)):
        rounded = xp.rounded(values, "bfloat16")
        assert rounded.dtype == values.dtype
        np.testing.assert_array_equal(rounded, values.astype(ml_dtypes.bfloat16).astype(values.dtype))


# ---- the Gram iteration


@pytest.mark.parametrize("shape", [(6, 4), (4, 16), (5, 5), (1, 7), (7, 1)])
@pytest.mark.parametrize("steps", [1, 2, 5, 9])
def test_gram_iterations_are_the_plain_ones(shape: tuple[int, int], steps: int) -> None:
    p, grads = gradients(shape, 2)
    cubic, quintic = (1.5, -0.5, 0.0), (3.0, -4.0, 2.0)
    for triples in ((quintic, cubic), (3.4445, -4.7750, 2.0315)):
        options: dict[str, Any] = dict(**EXACT, ns_steps=steps, ns_coefficients=triples)
        wanted, _ = run(Muon(**options), p, grads, lr=0.1)
        got, _ = run(Muon(**options, ns_method="gram"), p, grads, lr=0.1)
        assert error(got, wanted, p) < FLOAT64


def draw_matrix(rows: int, columns: int, values: Any) -> Any:
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.standard_normal((size, len(values))))[0] for size in (rows, columns))
    return left @ np.diag(values) @ right.T


@pytest.mark.parametrize("shape", [(96, 192), (400, 100), (64, 1024)], ids=str)
@pytest.mark.parametrize(
    "values",
    [np.ones, lambda n: np.logspace(0, -3, n), lambda n: np.logspace(0, -7, n), lambda n: np.eye(1, n)[0] + 1e-4],
    ids=["equal", "thousand", "ten million", "one"],
)
def test_gram_iterations_of_badly_conditioned_momentum(shape: tuple[int, int], values: Any) -> None:
    """In float16 they are as near to exact ones as plain ones in bfloat16, and no singular value is too large."""
    x = draw_matrix(*shape, values(min(shape)))
    exact, plain, gram = (
        -run(Muon(ns_dtype=dtype, ns_method=method, momentum=0.0, scaling=None), 0 * x, [x], lr=1.0)[0]
        for dtype, method in ((None, "plain"), ("bfloat16", "plain"), ("bfloat16", "auto"))
    )
    left, found, right = np.linalg.svd(x / np.linalg.norm(x), full_matrices=False)
    moved = np.diag(left.T @ gram @ right.T)[found > 0.01]
    assert moved.min() > 0.67
    assert np.linalg.norm(gram, 2) < 1.23  # the polynomial itself has a peak of 1.202
    assert np.linalg.norm(gram - exact) < np.linalg.norm(plain - exact) + 1e-3 * np.linalg.norm(exact)
