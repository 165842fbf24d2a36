"""Muon for JAX: the numbers of optax.contrib.muon, and of numpy where a leaf has several matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from lanes import one_in
from tolerances import FLOAT32

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

from thalweg.numpy import Muon  # noqa: E402
from thalweg.optax import MatrixAxes, muon  # noqa: E402

pytestmark = pytest.mark.slow

SHAPES = {"tall": (12, 5), "wide": (5, 12), "small": (3, 3)}


def trained(solver: Any, grads: list[Any], params: Any) -> Any:
    state, step = solver.init(params), jax.jit(solver.update)
    for g in grads:
        updates, state = step(g, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def problem() -> tuple[Any, list[Any]]:
    rng = np.random.default_rng(0)
    drawn = [{k: rng.standard_normal(s).astype(np.float32) for k, s in SHAPES.items()} for _ in range(6)]
    return drawn[0], drawn[1:]


def error(x: Any, wanted: Any, start: Any) -> float:
    return max(float(np.abs(x[k] - wanted[k]).max() / np.abs(wanted[k] - start[k]).max()) for k in wanted)


@pytest.mark.parametrize(
    "options", one_in(3, [{}, dict(nesterov=False, beta=0.8), dict(consistent_rms=0.2, weight_decay=0.1)]), ids=str
)
def test_equals_optax(options: dict[str, Any]) -> None:
    params, grads = problem()
    theirs, _ = trained(optax.contrib.muon(0.02, **options), grads, params)
    ours, state = trained(muon(0.02, **options), grads, params)
    assert error(ours, theirs, params) < FLOAT32
    assert state._fields == ("count", "momentum_buffer", "skipped")


@pytest.mark.parametrize(("inputs", "outputs"), one_in(3, [(2, 1), (0, (1, 2)), ((1, 2), 0)]))
def test_rows_of_declared_matrices_are_their_outputs(inputs: Any, outputs: Any) -> None:
    """Also where a leaf has matrices along further axes, each with means of its own."""
    rng = np.random.default_rng(0)
    params = {"w": rng.standard_normal((3, 4, 5)).astype(np.float32)}
    grads = [{"w": rng.standard_normal((3, 4, 5)).astype(np.float32)} for _ in range(3)]
    layout = lambda name, p: MatrixAxes(inputs=inputs, outputs=outputs)  # noqa: E731
    ours, _ = trained(muon(0.02, normalize="rows", layout=layout), grads, params)

    def as_matrices(x: Any) -> Any:
        """(matrices, outputs, inputs)."""
        ins, outs = ((axes,) if isinstance(axes, int) else axes for axes in (inputs, outputs))
        rest = tuple(axis for axis in range(3) if axis not in (*ins, *outs))
        rows, columns = (int(np.prod([x.shape[axis] for axis in axes])) for axes in (outs, ins))
        return x.transpose(*rest, *outs, *ins).reshape(-1, rows, columns).copy()

    arrays = {"w": as_matrices(params["w"])}
    optimizer = Muon(lr=0.02, variant="optax", scaling="original", normalize="rows", stacked_axes=1)
    for g in grads:
        optimizer.step(arrays, {"w": as_matrices(g["w"])})
    assert error({"w": as_matrices(np.asarray(ours["w"]))}, arrays, {"w": as_matrices(params["w"])}) < FLOAT32


@pytest.mark.nightly
def test_products_in_bfloat16_are_about_those_in_full_precision() -> None:
    """XLA may leave a rounding out that another library makes."""
    params, grads = problem()
    narrow, _ = trained(muon(0.02, ns_dtype="bfloat16"), grads, params)
    wide, _ = trained(muon(0.02), grads, params)
    assert 1e-4 < error(narrow, wide, params) < 0.05
