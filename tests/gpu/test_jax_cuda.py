"""Steps in JAX on a GPU: emitted kernels inside compiled programs, beside XLA's code for the same.

JAX_PLATFORMS=cuda pytest -m gpu tests/gpu/test_jax_cuda.py
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import tolerances

jax = pytest.importorskip("jax")
pytest.importorskip("optax")
pytest.importorskip("triton")
jnp = jax.numpy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU that JAX sees"),
]
SHAPES = [(130, 100), (7,), (2048, 33), (), (5, 3, 11)]


def cases() -> dict[str, Any]:
    from thalweg.optax import adamw, lamb, lars, lion, sgd, with_stats

    stacks = dict(stacked_axes=1, overrides=[(lambda name, p: p.ndim < 2, dict(stacked_axes=0))], max_grad_norm=0.1)
    return {
        "adamw": partial(adamw, 1e-3),
        "sgd": partial(sgd, 1e-3, momentum=0.9),
        "lion": partial(lion, 1e-3),
        "lars": partial(lars, 1e-3),
        "lamb": partial(lamb, lambda count: 1e-2 / (count + 1)),
        "stacks": partial(lamb, 1e-2, **stacks),
        "figures": lambda engine: with_stats(lamb(1e-2, engine=engine)),
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "lars", "lamb", "stacks", "figures"])
def test_kernels_and_xla_step_alike(name: str, dtype: str) -> None:
    from thalweg.optax import make_step

    params = [jnp.sin(jnp.arange(1.0, 1 + jnp.zeros(shape).size)).reshape(shape).astype(dtype) for shape in SHAPES]
    gradients = [jnp.cos(40 * p).astype("float32") * 1e-3 for p in params]
    results = []
    for engine in ("native", "native", "xla"):
        solver = cases()[name](engine=engine)
        step, new, state = jax.jit(make_step(solver)), params, solver.init(params)
        assert ("thalweg_launch" in step.lower(new, state, gradients).as_text()) == (engine == "native")
        for _ in range(5):
            new, state = step(new, state, gradients)
        results.append(jax.tree.leaves((new, state)))
    for a, b, c in zip(*results, strict=True):
        assert (a == b).all()
        if c.dtype.itemsize > 2:
            assert jnp.abs(a - c).max() <= tolerances.FUSED["float32"] * jnp.abs(c).max()
        else:
            assert (a != c).mean() <= tolerances.FUSED_FLIPPED
