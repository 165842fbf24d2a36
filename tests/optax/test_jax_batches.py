"""Matrices of equal shape are multiplied as one batch: programs hardly grow with layers, numbers stay what they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("optax")

from jax.extend.core import jaxprs_in_params  # noqa: E402
from optax_runs import assert_equal  # noqa: E402

import thalweg.numpy as reference  # noqa: E402
from thalweg.optax import kron, muon  # noqa: E402

pytestmark = pytest.mark.slow

#: More elements than leaves have that are stacked with all that belongs to them, and fewer.
LARGE, SMALL = (264, 256), (24, 16)
SOLVERS = {"kron": kron, "muon": muon}


def list_equations(jaxpr: Any, known: set[int]) -> Iterator[Any]:
    """Those of inner programs too, once for each of these."""
    if id(jaxpr) not in known:
        known.add(id(jaxpr))
        for equation in jaxpr.eqns:
            yield equation
            for inner in jaxprs_in_params(equation.params):
                yield from list_equations(inner, known)


def count_equations(name: str, layers: int, shape: tuple[int, int]) -> tuple[Counter[str], int]:
    """By primitive; and how many arrays there are of each layer."""
    params = {f"layer{i}": jax.ShapeDtypeStruct(shape, np.float32) for i in range(layers)}
    solver = SOLVERS[name](0.01)
    state = jax.eval_shape(solver.init, params)
    program = jax.make_jaxpr(solver.update)(params, state, params)
    found = Counter(equation.primitive.name for equation in list_equations(program.jaxpr, set()))
    return found, len(jax.tree.leaves((params, params, state))) // layers


@pytest.mark.parametrize("shape", [LARGE, SMALL], ids=["large", "small"])
@pytest.mark.parametrize("name", SOLVERS)
def test_programs_hardly_grow_with_layers(name: str, shape: tuple[int, int]) -> None:
    (few, arrays), (many, _) = (count_equations(name, layers, shape) for layers in (2, 8))
    for kind in ("dot_general", "cond", "add", "mul", "xor"):
        assert many[kind] == few[kind], f"{kind} by layer"
    # each array of a layer is put into a stack, or taken out of one by two equations
    assert many.total() - few.total() <= 6 * 3 * arrays


def test_kron_of_large_leaves_equals_the_numpy_front_end() -> None:
    """A batch of stacks; the noise of each leaf is its own."""
    options: dict[str, Any] = dict(stacked_axes=1, damping=0.01, max_grad_norm=2.0)
    theirs = reference.Kron(lr=0.01, engine="reference", **options)
    assert_equal(kron(0.01, **options), theirs, {"first": (2, 5, 6600), "second": (2, 5, 6600)})


@pytest.mark.nightly
def test_muon_of_large_leaves_equals_the_numpy_front_end() -> None:
    options: dict[str, Any] = dict(normalize="rows", split=2, weight_decay=0.1)
    theirs = reference.Muon(lr=0.02, variant="optax", engine="reference", **options)
    assert_equal(muon(0.02, **options), theirs, {"first": (6, 11000), "second": (6, 11000), "third": (6, 11000)})
