"""Native code and the reference, stepped side by side over the same numbers, and what must agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from cases import FUSED_CASES, FUSED_RULES
from raw_arrays import FRONT_END, Arrays, bfloat16, copies
from tolerances import FUSED, FUSED_FLIPPED

from thalweg.kernels.cpu.library import reason_missing
from thalweg.numpy import Optimizer

needs_core = pytest.mark.skipif(reason_missing() is not None, reason=f"no native core: {reason_missing()}")

every_rule = pytest.mark.parametrize("rule", FUSED_RULES)
DTYPES = ["float64", "float32", "bfloat16", "float16"]
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
NARROW = ("bfloat16", "float16")


def kind(dtype: str) -> Any:
    """The dtype of that name; a test is skipped where bfloat16 is not known."""
    return np.dtype(bfloat16() if dtype == "bfloat16" else dtype)


def widened(x: Any) -> Any:
    """x in float32; of 16 bits there are NaNs at which the instructions of some processors report an invalid value."""
    with np.errstate(invalid="ignore"):
        return x.astype("float32")


def alike(found: Any, expected: Any) -> None:
    """Equal numbers of 16 bits to the bit, but that one NaN is as good as another."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    unknown = np.isnan(widened(expected))
    assert np.array_equal(np.isnan(widened(found)), unknown)
    found, expected = found[~unknown], expected[~unknown]
    wrong = np.flatnonzero(found.view(np.uint16) != expected.view(np.uint16))
    assert not wrong.size, f"{wrong.size} differ: {found[wrong[:3]]} for {expected[wrong[:3]]}"


def draw(shapes: Mapping[str, tuple[int, ...]], dtype: str, seed: int = 0, scale: float = 1.0) -> Arrays:
    rng = np.random.default_rng(seed)
    return {name: np.asarray(rng.standard_normal(shape) * scale).astype(kind(dtype)) for name, shape in shapes.items()}


def draw_gradients(
    shapes: Mapping[str, tuple[int, ...]], dtype: str, steps: int, seed: int = 100, scale: float = 1.0
) -> list[Arrays]:
    """Gradients for each step, of a size that varies from step to step.

    Those of a few numbers are positive: averages of so few might cancel, and errors are measured by their size.
    """
    drawn = [draw(shapes, dtype, seed + t, scale * (3 - t % 3)) for t in range(steps)]
    return [{name: np.asarray(np.abs(g)) if g.size <= 3 else g for name, g in step.items()} for step in drawn]


def made(rule: str, engine: str, **options: Any) -> Optimizer:
    return FRONT_END[rule](**{"lr": FUSED_CASES[rule].lr, **options}, engine=engine)


class Both(NamedTuple):
    """Two optimizers after the same steps."""

    fused: Optimizer
    reference: Optimizer
    found: Arrays
    expected: Arrays
    start: Arrays

    def agree(self) -> None:
        """Parameters, all of the state and all figures are equal, to rounding."""
        assert self.fused.skipped == self.reference.skipped
        for name, expected in self.expected.items():
            found, start = self.found[name], self.start[name]
            precision = "float64" if expected.dtype == "float64" else "float32"
            assert_close(name, found, expected, precision, moved=start)
            assert_state(name, self.fused.state[name], self.reference.state[name], precision)
            assert_figures(name, self.fused.stats()[name], self.reference.stats()[name], precision)


def side_by_side(
    rule: str,
    params: Arrays,
    grads: Sequence[Mapping[str, Any]],
    *,
    engine: str = "fused",
    moves: bool = True,
    lockstep: bool = False,
    **options: Any,
) -> Both:
    """Step copies of a model by both engines. Something must move.

    ``lockstep``: compare after each step, and go on from the same numbers, so that roundings do not add up.
    """
    fused, reference = made(rule, engine, **options), made(rule, "reference", **options)
    found, expected = copies(params), copies(params)
    for step in grads:
        before = copies(expected)
        fused.step(found, step)
        reference.step(expected, step)
        if lockstep:
            Both(fused, reference, found, expected, before).agree()
            copy_into((found, fused.state), (expected, reference.state))
    if engine == "fused":
        assert fused.engine == "fused"
    assert reference.engine == "reference"
    moved = [not np.array_equal(expected[name], p, equal_nan=True) for name, p in params.items() if p.size]
    assert any(moved) or not moves or not moved, "nothing moved: comparing would prove nothing"
    return Both(fused, reference, found, expected, params)


def copy_into(to: Any, source: Any) -> None:
    """Overwrite arrays in place, wherever they are in a tree."""
    if isinstance(source, np.ndarray):
        to[...] = source
        return
    for key in source if isinstance(source, Mapping) else range(len(source)):
        copy_into(to[key], source[key])


def agree(rule: str, params: Arrays, grads: Sequence[Mapping[str, Any]], **options: Any) -> None:
    side_by_side(rule, params, grads, **options).agree()


def assert_state(name: str, found: Mapping[str, Any], expected: Mapping[str, Any], precision: str) -> None:
    assert list(found) == list(expected)
    for key, entry in expected.items():
        if key == "step":
            assert found[key] == entry
        else:
            assert_close(f"{name}, {key}", found[key], entry, precision)


def assert_close(what: str, found: Any, expected: Any, precision: str, *, moved: Any = None) -> None:
    """Of one array, computed in some precision. ``moved``: where it began; float64 is measured by how far it went."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), what
    if not found.size:
        return
    if expected.dtype.name in NARROW:
        assert_neighbours(what, found, expected)
        return
    a, b = found.astype("float64"), expected.astype("float64")
    assert np.array_equal(np.isfinite(a), np.isfinite(b)), what
    assert np.array_equal(a[~np.isfinite(b)], b[~np.isfinite(b)], equal_nan=True), what
    a, b, at = a[np.isfinite(b)], b[np.isfinite(b)], np.isfinite(b)
    size = np.abs(b).max(initial=0)
    if moved is not None and expected.dtype == "float64":
        size = min(size, np.abs(b - moved[at]).max(initial=0))
    error = np.abs(a - b).max(initial=0)
    bound = FUSED["float32" if expected.dtype == "float32" else precision] * size
    assert error <= bound, f"{what}: off by {error:.3g}, {error / max(size, 1e-300):.3g} of {size:.3g}"


def ordered(x: Any) -> Any:
    """Numbers of 16 bits as integers, neighbours next to one another (and both zeros the same)."""
    bits = x.view(np.int16).astype(np.int32)
    return np.where(bits >= 0, bits, -(bits & 0x7FFF))


def assert_neighbours(what: str, found: Any, expected: Any) -> None:
    """Equal bits, but for a few results that lay on two sides of the middle between two neighbours."""
    a, b = found.astype("float32"), expected.astype("float32")
    assert np.array_equal(np.isnan(a), np.isnan(b)), what
    known = ~np.isnan(b)
    size = np.abs(b[np.isfinite(b)]).max(initial=0)
    with np.errstate(all="ignore"):
        near = np.abs(a - b) <= FUSED["float32"] * size  # next to zero, neighbours are closer than float32 can tell
    apart = np.where(near, 0, np.abs(ordered(found) - ordered(expected)))[known]
    assert apart.max(initial=0) <= 1, f"{what}: {apart.max()} neighbours apart"
    share = (apart > 0).sum() / max(apart.size, 200)
    assert share <= FUSED_FLIPPED, f"{what}: {share:.3%} are rounded to another neighbour"


def assert_figures(name: str, found: Mapping[str, Any], expected: Mapping[str, Any], precision: str) -> None:
    assert list(found) == list(expected), name
    bound = FUSED[precision]
    for key, value in expected.items():
        a, b = np.asarray(found[key], "float64"), np.asarray(value, "float64")
        b = np.broadcast_to(b, a.shape) if b.ndim == 0 else b  # without trust, a rule has one ratio for all slices
        assert a.shape == b.shape or a.size == b.size == 0, (name, key)
        if not a.size:
            continue
        assert np.array_equal(np.isfinite(a), np.isfinite(b)), (name, key, a, b)
        at = np.isfinite(b)
        assert np.all(np.abs(a[at] - b[at]) <= bound * np.abs(b[at])), (name, key, a, b)
