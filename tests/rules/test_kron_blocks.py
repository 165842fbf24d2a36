"""Kron with factors in blocks is Kron on each block by itself."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from tolerances import FLOAT64

from thalweg.boundary import advance
from thalweg.numpy import Kron as KronOptimizer
from thalweg.rules import Kron
from thalweg.settings import Numerics
from thalweg.spaces import numpy as xp
from thalweg.storage import first_state

STEPS, SEED = 6, 0


def stepped(rule: Kron, p: Any, grads: list[Any], noises: list[Any]) -> tuple[Any, Any]:
    state = first_state(xp, rule, Numerics(), p)
    for t, (g, noise) in enumerate(zip(grads, noises, strict=True), 1):
        p, state, *_ = advance(
            xp, rule, Numerics(), p, g, state, t=t, lr=0.01, lr_scale=1.0, tensor=0, noise=lambda noise=noise: noise
        )
    return p, state


def pieces(sizes: tuple[int, ...], side: int) -> list[tuple[slice, ...]]:
    """Where the blocks are."""
    along = [[slice(i, min(i + side, n)) for i in range(0, n, side)] for n in sizes]
    return list(itertools.product(*along))


@pytest.mark.parametrize("geometry", ["procrustes", "quad", "eq"])
@pytest.mark.parametrize(
    ("shape", "side"), [((6, 9), 3), ((7, 5), 3), ((5, 5), 4), ((4, 5, 3), 2), ((9, 4), 4), ((3, 2), 5)], ids=str
)
def test_each_block_is_a_matrix_of_its_own(shape: tuple[int, ...], side: int, geometry: Any) -> None:
    rule = Kron(
        block_size=side, geometry=geometry, max_skew=None, merge=None, clip=None, precond_update_probability=0.6
    )
    rng = np.random.default_rng(SEED)
    p, *drawn = rng.standard_normal((1 + 2 * STEPS, *shape))
    grads, noises = drawn[:STEPS], drawn[STEPS:]
    whole, state = stepped(rule, p, grads, noises)
    apart = np.empty_like(p)
    alone = Kron(**{**vars(rule), "block_size": None})
    norms = []
    for block in pieces(shape, side):
        apart[block], own = stepped(alone, p[block], [g[block] for g in grads], [z[block] for z in noises])
        norms.append(float(own["L_0"]))
    assert np.abs(whole - apart).max() < FLOAT64 * np.abs(whole - p).max()
    assert np.ravel(state["L_0"]) == pytest.approx(norms, rel=FLOAT64)


def test_the_rms_of_the_whole_tensor_is_clipped() -> None:
    rng = np.random.default_rng(SEED)
    p, *drawn = rng.standard_normal((1 + 2 * STEPS, 6, 6))
    grads, noises = drawn[:STEPS], drawn[STEPS:]
    options: Any = dict(block_size=3, momentum=0.0)
    (bare, _), (clipped, _) = (stepped(Kron(clip=c, **options), p, grads[:1], noises[:1]) for c in (None, 0.01))
    ratios = (clipped - p) / (bare - p)
    assert np.ptp(ratios) < 1e-9 * ratios.mean()  # one factor for all blocks
    assert np.sqrt(np.mean((clipped - p) ** 2)) == pytest.approx(0.01 * 0.01)


def test_axes_with_diagonal_factors_are_not_cut() -> None:
    """As in published code: a cut there would save nothing."""
    optimizer = KronOptimizer(lr=0.01, block_size=4)
    optimizer.update("w", np.zeros((24, 10)), np.ones((24, 10)))
    shapes = {key: entry.shape for key, entry in optimizer.state["w"].items()}
    assert (shapes["Q_0"], shapes["Q_1"], shapes["L_0"]) == ((3 * 24,), (10, 4), (3, 1))
    assert Kron(block_size=4).treatment((24, 10)) == "3 blocks, factors diagonal 24, dense 4"
    assert Kron(block_size=256).treatment((100, 100)) == Kron().treatment((100, 100))


def test_jax_shards_factors_of_blocks_by_their_stack_alone() -> None:
    jax = pytest.importorskip("jax")
    from thalweg.optax import kron, state_specs

    spec = jax.sharding.PartitionSpec
    params = {"w": jax.ShapeDtypeStruct((2, 8, 8), "float32")}
    solver = kron(0.01, block_size=4, stacked_axes=1)
    state = jax.eval_shape(solver.init, params)
    found = state_specs(state, params, {"w": spec("layers", "rows", None)})
    assert [leaf.shape for leaf in (*state.Q["w"], *state.L["w"])] == [(2, 16, 4)] * 2 + [(2, 4, 1)] * 2
    assert (*found.Q["w"], *found.L["w"]) == (spec("layers"),) * 4
