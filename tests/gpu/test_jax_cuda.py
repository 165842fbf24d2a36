"""Steps in JAX on a GPU: emitted kernels inside compiled programs, beside XLA's code for the same.

JAX_PLATFORMS=cuda pytest -m gpu tests/gpu/test_jax_cuda.py
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import tolerances
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import thalweg.optax as ours
from thalweg.optax.products import Products

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU that JAX sees")]
SHAPES = [(130, 100), (7,), (2048, 33), (), (64, 128), (5, 3, 11)]


STACKS: dict[str, Any] = dict(
    stacked_axes=1, overrides=[(lambda name, p: p.ndim < 2, dict(stacked_axes=0))], max_grad_norm=0.1
)
CASES: dict[str, Any] = {
    "adamw": partial(ours.adamw, 1e-3),
    "sgd": partial(ours.sgd, 1e-3, momentum=0.9),
    "lion": partial(ours.lion, 1e-3),
    "lars": partial(ours.lars, 1e-3),
    "lamb": partial(ours.lamb, lambda count: 1e-2 / (count + 1)),
    "stacks": partial(ours.lamb, 1e-2, **STACKS),
    "figures": lambda engine: ours.with_stats(ours.lamb(1e-2, engine=engine)),
    "adafactor": partial(ours.adafactor, 1e-2, min_dim_size_to_factor=8),
    "adafactor, momentum": partial(ours.adafactor, 1e-2, min_dim_size_to_factor=8, momentum=0.9),
    "guarded": partial(ours.lamb, 1e-2, on_nonfinite="skip"),
    "adafactor, guarded": partial(ours.adafactor, 1e-2, min_dim_size_to_factor=8, on_nonfinite="skip"),
    "random": partial(ours.adamw, 1e-3, rounding="stochastic", state_dtype="bfloat16", state_rounding="stochastic"),
    "compensated": partial(ours.adamw, 1e-3, rounding="compensated"),
    "eight bits": partial(ours.adamw, 1e-3, state_dtype="int8"),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_kernels_and_xla_step_alike(name: str, dtype: str) -> None:
    params = [jnp.sin(jnp.arange(1.0, 1 + jnp.zeros(shape).size)).reshape(shape).astype(dtype) for shape in SHAPES]
    gradients = [jnp.cos(40 * p).astype("float32") * 1e-3 for p in params]
    results = []
    for engine in ("native", "native", "xla"):
        solver = CASES[name](engine=engine)
        step, new, state = jax.jit(ours.make_step(solver)), params, solver.init(params)
        assert ("thalweg_launch" in step.lower(new, state, gradients).as_text()) == (engine == "native")
        for _ in range(5):
            new, state = step(new, state, gradients)
        results.append(jax.tree.leaves((new, state)))
    for a, b, c in zip(*results, strict=True):
        assert (a == b).all()
        if c.dtype.itemsize > 2 and name != "random":
            assert jnp.abs(a - c).max() <= tolerances.FUSED["float32"] * jnp.abs(c).max()
        elif c.dtype.itemsize > 2:  # of state that fell to the other neighbour
            beyond = jnp.abs(a - c) > tolerances.FUSED["float32"] * jnp.abs(c).max()
            assert beyond.mean() <= tolerances.FUSED_FLIPPED
        else:
            assert (a != c).mean() <= tolerances.FUSED_FLIPPED


@pytest.mark.parametrize("name", ["guarded", "adafactor, guarded"])
def test_a_step_that_is_not_finite_is_left_out_as_a_whole(name: str) -> None:
    solver = CASES[name](engine="native")
    params = [jnp.ones(shape, "float32") for shape in SHAPES]
    step, state = jax.jit(ours.make_step(solver)), solver.init(params)
    good = [jnp.full_like(p, 0.5) for p in params]
    bad = [*good[:-1], good[-1].at[1, 2, 3].set(jnp.inf)]
    params, state = step(params, state, good)
    new, skipped = step(params, state, bad)
    assert [int(skipped.skipped), int(skipped.count)] == [1, 1]
    before, after = (jax.tree.leaves((p, s._replace(skipped=None))) for p, s in ((params, state), (new, skipped)))
    assert all((a == b).all() for a, b in zip(before, after, strict=True))
    new, state = step(new, skipped, good)
    assert int(state.count) == 2
    assert not (new[0] == params[0]).all()


def test_parts_are_stepped_with_sums_between_calls() -> None:
    """On a mesh of one device, whose sums are its own."""
    params = [jnp.sin(jnp.arange(1.0, 13001)).reshape(130, 100).astype("float32"), jnp.ones(7, "float32")]
    gradients, specs = [jnp.cos(40 * p) for p in params], [P("x"), P()]
    solver, mesh = ours.lamb(1e-2, engine="native"), jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
    state = solver.init(params)
    own = ours.state_specs(state, params, specs)
    step = ours.make_step(ours.lamb(1e-2, engine="native", specs=specs))
    parts = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(specs, own, specs), out_specs=(specs, own)))
    assert parts.lower(params, state, gradients).as_text().count("@thalweg_launch") == 3
    found, expected = (f(params, state, gradients) for f in (parts, jax.jit(ours.make_step(solver))))
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert jnp.abs(a - b).max() <= tolerances.FUSED["float32"] * jnp.abs(b).max()


@pytest.mark.parametrize("name", ["lamb", "adafactor, guarded"])
def test_steps_inside_command_buffers(name: str) -> None:
    """Programs that XLA replays as graphs, over other buffers and with other gradients each time."""
    solver = CASES[name](engine="native")
    params = [jnp.linspace(-1, 1, math.prod(own), dtype="float32").reshape(own) for own in SHAPES]
    step = ours.make_step(solver)

    @jax.jit
    def train(params: Any, state: Any) -> Any:
        return step(params, state, [jnp.cos(40 * p) for p in params])

    lowered = train.lower(params, solver.init(params))
    programs = [lowered.compile({"xla_gpu_graph_min_graph_size": least}) for least in (1, 2**30)]
    kept: list[Any] = [[(params, solver.init(params))] * 2]
    for _ in range(10):
        kept.append([program(*own) for program, own in zip(programs, kept[-1], strict=True)])
    for pair in kept:
        assert all((a == b).all() for a, b in zip(*map(jax.tree.leaves, pair), strict=True))


@pytest.mark.parametrize("method", ["plain", "auto"])
def test_products_by_kernels(method: str) -> None:
    """As near to exact steps as XLA's products in bfloat16 are, and with the same bits in every run."""
    shapes = [shape for shape in ((640, 1536), (1536, 640), (768, 768)) for _ in range(8)]
    keys = jax.random.split(jax.random.key(0), 2 * len(shapes))
    params = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=False)]
    gradients = [jax.random.normal(key, shape) for key, shape in zip(keys[len(shapes) :], shapes, strict=True)]
    found: list[Any] = []
    for options in (
        dict(engine="xla", ns_dtype=None),
        dict(engine="xla", ns_dtype="bfloat16"),
        *[dict(ns_dtype="bfloat16", ns_method=method)] * 2,
    ):
        solver: Any = ours.muon(0.02, **options)
        step, new, state = jax.jit(ours.make_step(solver)), params, solver.init(params)
        assert ("thalweg_launch" in step.lower(new, state, gradients).as_text()) == ("engine" not in options)
        for _ in range(3):
            new, state = step(new, state, gradients)
        found.append(new)
    for exact, xla, kernels, again, start in zip(*found, params, strict=True):
        assert (kernels == again).all()
        bound = 1.1 * jnp.linalg.norm(xla - exact) + 1e-3 * jnp.linalg.norm(exact - start)
        assert jnp.linalg.norm(kernels - exact) < bound


@pytest.mark.parametrize("precision", [None, "tensorfloat32"])
@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, False), (True, True)])
def test_products_of_float32_by_the_library(turned: tuple[bool, bool], precision: str | None) -> None:
    """Within the rounding of their precision, and with the same bits inside command buffers."""

    def multiply(*operands: Any) -> Any:
        xp = Products()
        return xp.matmul(*(xp.swapaxes(x, -2, -1) if own else x for x, own in zip(operands, turned, strict=True)))

    keys = jax.random.split(jax.random.key(0))
    shapes = (3, 70, 50), (3, 50, 90)
    stacks = [jax.random.normal(key, shape, "float32") for key, shape in zip(keys, shapes, strict=True)]
    operands = [jnp.swapaxes(x, 1, 2) if own else x for x, own in zip(stacks, turned, strict=True)]
    with jax.default_matmul_precision(precision):
        lowered = jax.jit(multiply).lower(*operands)
    assert "thalweg_multiply" in lowered.as_text()
    programs = [lowered.compile({"xla_gpu_graph_min_graph_size": least}) for least in (1, 2**30)]
    found, *others = (jax.device_get(program(*operands)) for program in programs for _ in range(3))
    assert all((own == found).all() for own in others)
    x, y = (jax.device_get(own).astype("float64") for own in stacks)
    rounding = x.shape[2] * 2.0**-23 + (0 if precision is None else 2.0**-9)
    assert (abs(found - x @ y) <= rounding * (abs(x) @ abs(y))).all()


@pytest.mark.parametrize("name", ["kron", "soap", "muon"])
def test_rules_by_the_library_and_by_xla(name: str) -> None:
    """SOAP with gradients of full rank, another in each step: its bases, or its steps in them, are else not unique."""
    make: dict[str, Any] = {
        "kron": partial(ours.kron, 1e-2, precond_update_probability=1.0, precond_precision="float32"),
        "soap": partial(ours.soap, 1e-2, precondition_frequency=2),
        "muon": partial(ours.muon, 0.02, layout="torch"),
    }
    shapes: list[Any] = [*[(96, 64)] * 3, (64, 200), (8, 3, 5, 5), *([] if name == "muon" else [(30,)])]
    if name == "soap":
        shapes = [*[(16, 16)] * 3, (8, 3, 5, 5), (30,)]

    def draw(seed: int) -> list[Any]:
        keys = jax.random.split(jax.random.key(seed), len(shapes))
        return [jax.random.normal(key, shape, "float32") for key, shape in zip(keys, shapes, strict=True)]

    params, *gradients = map(draw, range(4))
    found: list[Any] = []
    for engine in ("auto", "auto", "xla"):
        solver = make[name](engine=engine)
        step, new, state = jax.jit(ours.make_step(solver)), params, solver.init(params)
        assert ("thalweg_multiply" in step.lower(new, state, params).as_text()) == (engine == "auto")
        for own in gradients:
            new, state = step(new, state, own)
        found.append(new)
    for library, again, xla, start in zip(*found, params, strict=True):
        assert (library == again).all()
        assert jnp.linalg.norm(library - xla) < 1e-4 * jnp.linalg.norm(xla - start)
