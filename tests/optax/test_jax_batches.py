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

from thalweg.optax import kron, muon  # noqa: E402
from thalweg.optax.batches import Job, Step, first_entries, step_all  # noqa: E402
from thalweg.optax.trees import parameters  # noqa: E402

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


def test_kron_refreshes_all_shapes_in_one_program_but_large_ones() -> None:
    shapes = {"a": (6, 8), "b": (8, 6), "c": (6,), "d": (3,), "large": (2**13, 2**12 + 1)}
    params = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}
    state = jax.eval_shape(kron(0.01).init, params)
    program = jax.make_jaxpr(kron(0.01).update)(params, state, params)
    assert sum(equation.primitive.name == "cond" for equation in list_equations(program.jaxpr, set())) == 2


def test_lean_stacks_have_the_numbers_of_others() -> None:
    """Of which no more is stacked than what is transformed."""
    numbers = np.random.default_rng(0)
    params, grads = ({n: numbers.normal(size=(8, 24)).astype("float32") for n in "abc"} for _ in range(2))
    options: Any = dict(split=2, weight_decay=0.1, scaling="match_rms_adamw")
    owner: Any = muon(0.02, ns_dtype="bfloat16", layout="torch", **options).update.__self__
    leaves = owner.leaves(params, parameters(params))
    jobs = [
        Job(leaf.names, leaf.p, leaf.setting, leaf.mesh_axes, leaf.axes, grads[n], first_entries(leaf))
        for n, leaf in zip("abc", leaves, strict=True)
    ]
    plain, lean = (step_all(jobs, Step(1, 0.02, None, guarded=True, lean=lean)) for lean in (False, True))
    for a, b in zip(plain, lean, strict=True):
        for x, y in zip(*map(jax.tree.leaves, ((a.delta, a.state, a.stats), (b.delta, b.state, b.stats))), strict=True):
            assert x.shape == y.shape
            np.testing.assert_array_equal(x, y)
        assert a.finite == b.finite
