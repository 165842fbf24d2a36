"""The functions of optax's names take its arguments and give its numbers; where they differ on purpose, it is shown.

tests/published has single options, these rows options together, schedules, masks and arrays.
"""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax_runs import error, problem, train
from tolerances import FLOAT32, OPTAX_ADAFACTOR, ROUNDED_STEP

import thalweg.optax as ours

pytestmark = pytest.mark.slow  # each row compiles two programs

#: A matrix above 128, which is factored, and leaves of equal shape.
SHAPES: Any = {"layers": [{"w": (136, 144), "bias": (144,)}, {"w": (24, 40)}, {"w": (24, 40)}], "gain": ()}
TREE: Any = {"layers": [{"w": True, "bias": False}, {"w": False}, {"w": True}], "gain": False}
PREFIX: Any = {"layers": True, "gain": False}
STEPS = 8


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda p: p.ndim > 1, params)


def falling(count: Any) -> Any:
    return 0.1 / (count + 1)


def arrays(**options: float) -> dict[str, Any]:
    return {name: jnp.float32(value) for name, value in options.items()}


#: Every option of optax's function, in options that go together.
ROWS: dict[str, tuple[dict[str, Any], ...]] = {
    "adafactor": (
        dict(
            **arrays(learning_rate=0.02, decay_rate=0.6, clipping_threshold=2.0, momentum=0.7, weight_decay_rate=0.01),
            decay_offset=jnp.int32(0),
            eps=jnp.float32(1e-20),
            weight_decay_mask=PREFIX,
        ),
        dict(
            learning_rate=optax.warmup_cosine_decay_schedule(0.0, 0.05, 3, 7),
            min_dim_size_to_factor=1,
            decay_rate=0.7,
            clipping_threshold=None,
            weight_decay_rate=falling,
            eps=1e-5,
            weight_decay_mask=TREE,
        ),
        dict(learning_rate=None, factored=False, multiply_by_parameter_scale=False, clipping_threshold=0.1),
    ),
    "lamb": (
        dict(**arrays(learning_rate=0.02, b1=0.8, b2=0.9, eps=1e-3, eps_root=1e-3, weight_decay=0.1), mask=matrices),
        dict(learning_rate=falling, b1=0.8, b2=0.95, eps=1e-3, eps_root=1e-4, weight_decay=falling, mask=TREE),
    ),
    "lars": (
        dict(
            **arrays(learning_rate=0.1, weight_decay=0.1, momentum=0.8), weight_decay_mask=TREE, trust_ratio_mask=False
        ),
        dict(
            learning_rate=falling,
            weight_decay=falling,
            weight_decay_mask=matrices,
            trust_coefficient=0.1,
            eps=0.5,
            trust_ratio_mask=TREE,
            momentum=0.7,
            nesterov=True,
        ),
    ),
}


@pytest.mark.parametrize(("name", "row"), [(name, row) for name, rows in ROWS.items() for row in range(len(rows))])
def test_steps_are_those_of_optax(name: str, row: int) -> None:
    params, grads = problem(SHAPES, steps=STEPS, dtype="float32")
    options = ROWS[name][row]
    mine, _ = train(getattr(ours, name)(**options), params, grads)
    theirs, _ = train(getattr(optax, name)(**options), params, grads)
    assert error(mine, theirs, params) < FLOAT32


def test_every_option_of_optax_has_a_row() -> None:
    for name, rows in ROWS.items():
        named = {option for options in rows for option in options}
        added = {"dtype_momentum"} if name == "adafactor" else set()
        assert set(inspect.signature(getattr(optax, name)).parameters) == named | added


def test_float64_is_that_of_optax_but_for_momentum_which_is_float32_unless_asked() -> None:
    params, grads = problem({"w": (130, 136)}, steps=STEPS)
    for dtype in ("float32", "float64"):
        options: Any = dict(momentum=0.9, dtype_momentum=dtype)
        mine, state = train(ours.adafactor(0.01, **options), params, grads)
        assert {leaf.dtype for leaf in jax.tree.leaves(state.exp_avg)} == {jnp.dtype(dtype)}
        theirs, _ = train(optax.adafactor(0.01, **options), params, grads)
        assert error(mine, theirs, params) < (FLOAT32 if dtype == "float32" else OPTAX_ADAFACTOR)


def test_a_decay_offset_that_has_been_passed_equals_optax() -> None:
    """State from step 12 on, offset 10: the squares are as at step 3."""
    params, grads = problem({"w": (6, 4)}, steps=STEPS)
    count = dict(count=jnp.asarray(12, jnp.int32))
    theirs, _ = train(
        optax.adafactor(0.01, decay_offset=10), params, grads, start=lambda s: (s[0]._replace(**count), *s[1:])
    )
    mine, without = (
        train(ours.adafactor(0.01, decay_offset=offset), params, grads, start=lambda s: s._replace(**count))[0]
        for offset in (10, 0)
    )
    assert error(mine, theirs, params) < OPTAX_ADAFACTOR < 1e-3 * error(without, theirs, params)


# ---- differences on purpose

STEP = {"adafactor": 0.01, "lamb": 0.01, "lars": 1.0}
every_name = pytest.mark.parametrize("name", STEP)


def after(library: Any, name: str, p: Any, g: Any, *, steps: int = 1, **options: Any) -> tuple[Any, Any, Any]:
    """Parameter, last update and state after some steps with one gradient."""
    solver = getattr(library, name)(**{"learning_rate": STEP[name], **options})
    state = solver.init(p)
    for _ in range(steps):
        updates, state = solver.update(g, state, p)
        p = optax.apply_updates(p, updates)
    return np.asarray(p).astype(np.float64), updates, state


@pytest.mark.parametrize(
    ("name", "p", "g", "theirs"),
    [
        ("adafactor", 1.0, 0.0, np.nan),  # squares below 6e-8, and eps itself, are 0 there
        ("adafactor", 1.0, 1e-4, np.nan),
        ("lamb", 30.0, 1.0, -np.inf),  # 3000 times 30**2 is more than 65504
        ("lars", 30.0, 1.0, -np.inf),
        ("lars", 1.0, 1e-5, 1.0),  # the norm is 0 there, the ratio 1, and the step lost
    ],
)
def test_optax_loses_float16_and_ours_is_close_to_float32(name: str, p: float, g: float, theirs: float) -> None:
    narrow, wide = ((jnp.full(3000, p, dtype), jnp.full(3000, g, dtype)) for dtype in ("float16", "float32"))
    lost, mine, right = (after(lib, name, *own)[0] for lib, own in ((optax, narrow), (ours, narrow), (ours, wide)))
    assert np.array_equal(lost, np.full(3000, theirs), equal_nan=True)
    assert np.abs(mine - right).max() <= ROUNDED_STEP * np.abs(right - p).max()


def test_optax_adafactor_is_nan_without_eps_or_with_a_negative_decay_rate_and_ours_is_not() -> None:
    p, g = jnp.ones(3), jnp.zeros(3)
    assert np.isnan(after(optax, "adafactor", p, g, eps=0.0)[0]).all()
    assert (after(ours, "adafactor", p, g, eps=0.0)[0] == 1).all()
    params, grads = problem({"w": (8, 6)}, steps=10)
    assert np.isnan(train(optax.adafactor(0.01, decay_rate=-0.8), params, grads)[0]["w"]).any()
    either = [train(ours.adafactor(0.01, decay_rate=rate), params, grads)[0]["w"] for rate in (-0.8, 0.8)]
    assert np.array_equal(*either)


@every_name
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_goes_through_as_in_optax_unless_steps_are_skipped(name: str, bad: float) -> None:
    p, g = jnp.ones(3), jnp.asarray([1.0, bad, 1.0])
    theirs, mine = (after(library, name, p, g)[0] for library in (optax, ours))
    assert np.isnan(theirs[1])
    assert np.array_equal(mine, theirs, equal_nan=True)
    skipped, _, state = after(ours, name, p, g, on_nonfinite="skip")
    assert (skipped == 1).all()
    assert (int(state.count), int(state.skipped)) == (0, 1)


@every_name
def test_zeros_move_as_in_optax(name: str) -> None:
    for p, g in ((0.0, 1.0), (1.0, 0.0), (0.0, 0.0)):
        theirs, mine = (after(lib, name, jnp.full(2, p), jnp.full(2, g), steps=2)[0] for lib in (optax, ours))
        assert np.isfinite(mine).all()
        assert np.abs(mine - theirs).max() <= FLOAT32 * np.abs(theirs - p).max()
