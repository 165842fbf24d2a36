"""Native code against its rule: options, shapes, dtypes and values drawn at random."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from side_by_side import DTYPES, NARROW, agree, draw, draw_gradients, kind, made, needs_core

pytest.importorskip("hypothesis")
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from thalweg.errors import OptionError
from thalweg.kernels.threads import set_num_threads

pytestmark = [needs_core, pytest.mark.slow]
EXAMPLES = settings.default.max_examples

flags = st.booleans()
fractions = st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.99])
decays = st.sampled_from([0.0, 0.01, 0.3])
rates = st.sampled_from([1e-3, 0.02, 0.5])

RULE_OPTIONS: dict[str, dict[str, Any]] = {
    "LARS": dict(
        lr=rates,
        momentum=fractions,
        weight_decay=decays,
        trust_coefficient=st.sampled_from([1e-3, 0.1, 2.0]),
        eps=st.sampled_from([0.0, 1e-8, 0.5]),
        nesterov=flags,
        trust=flags,
        always_adapt=flags,
        keep_norms=flags,
        norm_mode=st.sampled_from(["paper", "combined"]),
        momentum_mode=st.sampled_from(["lr_inside", "lr_outside"]),
        clip=flags,
        zero_ratio=st.sampled_from([1.0, 0.0, "eta"]),
    ),
    "LAMB": dict(
        lr=rates,
        betas=st.tuples(fractions, fractions),
        eps=st.sampled_from([1e-6, 1e-2]),
        weight_decay=decays,
        bias_correction=flags,
        grad_averaging=flags,
        trust=flags,
        always_adapt=flags,
        keep_norms=flags,
        trust_clip=st.sampled_from([None, (0.01, 10.0), (2.0, 3.0)]),
        phi=st.sampled_from([None, (0.0, 3.0), (5.0, 6.0)]),
        eps_root=st.sampled_from([0.0, 1e-3]),
        weight_decay_mode=st.sampled_from(["in_update", "decoupled", "l2"]),
    ),
    "Adafactor": dict(
        lr=st.one_of(st.none(), rates),
        beta2_decay=st.sampled_from([-0.8, 0.5]),
        eps=st.sampled_from([(1e-30, 1e-3), (0.1, 0.5)]),
        clip_threshold=st.sampled_from([None, 1.0, 0.2]),
        weight_decay=decays,
        relative_step=st.sampled_from([None, True, False]),
        warmup_init=flags,
        scale_parameter=st.sampled_from([True, False, "relative"]),
        momentum=st.one_of(st.none(), fractions),
        momentum_mode=st.sampled_from(["after_lr", "before_lr"]),
        weight_decay_mode=st.sampled_from(["alpha", "lr", "independent"]),
        decay_offset=st.sampled_from([0, 2]),
        beta2_cap=st.sampled_from([None, 0.5]),
        eps_mode=st.sampled_from(["grad_sq", "clamp"]),
        factored=flags,
        min_dim_size_to_factor=st.sampled_from([1, 2, 8]),
        factor_dims=st.sampled_from(["largest2", "last2"]),
        only_2d=flags,
    ),
}
#: What is stored. Results of 16 bits are often ties (p + 5, say), which two engines may break differently: they have
#: tests of their own, on numbers where that is rare.
WIDE = ("float32", "float64")
HANDLING = dict(
    maximize=flags,
    max_grad_norm=st.sampled_from([None, 0.5, 1e9]),
    on_nonfinite=st.sampled_from(["propagate", "skip", "raise"]),
    rounding=st.sampled_from(["nearest", "stochastic"]),
    state_dtype=st.sampled_from([None, *WIDE]),
    momentum_dtype=st.sampled_from([None, *WIDE]),
    seed=st.integers(0, 3),
)
axes = st.sampled_from([0, 1, 2, 3, 7, 16, 31, 33])
shapes = st.lists(st.lists(axes, max_size=4).map(tuple).filter(lambda s: np.prod(s) < 40_000), min_size=1, max_size=4)


@st.composite
def options_of(draw_one: Any, rule: str) -> dict[str, Any]:
    """Some options beside the defaults."""
    table = {**RULE_OPTIONS[rule], **HANDLING}
    chosen = draw_one(st.lists(st.sampled_from(sorted(table)), unique=True, max_size=8))
    chosen += [name for name in ("lr",) if name not in chosen]
    return {name: draw_one(table[name]) for name in chosen}


@pytest.mark.parametrize("rule", RULE_OPTIONS)
@settings(max_examples=5 * EXAMPLES // 2, derandomize=True)
@given(data=st.data())
def test_whatever_the_options_it_equals_its_rule(rule: str, data: Any) -> None:
    pytest.importorskip("ml_dtypes")
    options = data.draw(options_of(rule))
    dtype, of_gradient = data.draw(st.sampled_from(WIDE)), data.draw(st.sampled_from(DTYPES))
    given_shapes = {str(i): shape for i, shape in enumerate(data.draw(shapes))}
    stacked = data.draw(st.integers(0, min(map(len, given_shapes.values()))))
    scale = data.draw(st.sampled_from([1.0, 1e-3, 30.0]))
    params = draw(given_shapes, dtype, seed=data.draw(st.integers(0, 5)))
    grads = draw_gradients(given_shapes, of_gradient, data.draw(st.integers(1, 3)), scale=scale)
    for name in data.draw(st.lists(st.sampled_from(sorted(given_shapes)), max_size=1)):
        params[name][...] = 0
    set_num_threads(data.draw(st.integers(1, 3)))
    try:
        made(rule, "reference", **options)
    except OptionError:
        reject()  # options that do not go together
    try:
        agree(rule, params, grads, **options, stacked_axes=stacked, engine="auto", moves=False, lockstep=True)
    finally:
        set_num_threads(None)


@settings(max_examples=3 * EXAMPLES // 2, derandomize=True)
@given(rows=st.integers(1, 200), columns=st.integers(1, 200), data=st.data())
def test_whatever_the_matrix_its_factors_are_equal(rows: int, columns: int, data: Any) -> None:
    before, between, behind = (data.draw(st.integers(1, 4)) for _ in range(3))
    shape = (before, rows, between, columns, behind)
    dtype = data.draw(st.sampled_from(["float32", "float64"]))
    clamp = data.draw(st.sampled_from([{}, dict(eps=(0.2, 1e-3), eps_mode="clamp")]))
    params, grads = draw({"w": shape}, dtype), draw_gradients({"w": shape}, dtype, 2)
    agree("Adafactor", params, grads, min_dim_size_to_factor=1, momentum=0.5, **clamp)


@pytest.mark.parametrize("rule", RULE_OPTIONS)
@settings(max_examples=EXAMPLES, derandomize=True)
@given(data=st.data())
def test_whatever_the_numbers_it_equals_its_rule(rule: str, data: Any) -> None:
    """Elements of very different size in one tensor, zeros and the smallest numbers among them."""
    dtype = data.draw(st.sampled_from(["float32", "float64", *NARROW]))
    kind(dtype)
    exponents = {"float32": 12, "float64": 60, "bfloat16": 12, "float16": 3}[dtype]
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))

    def drawn(shape: tuple[int, ...]) -> Any:
        sizes = 10.0 ** rng.uniform(-exponents, min(exponents, 6), shape)
        return (rng.standard_normal(shape) * sizes * (rng.random(shape) < 0.8)).astype(kind(dtype))

    shape = data.draw(st.sampled_from([(50,), (1100,), (20, 30), (40, 3, 20)]))
    steps = [{"w": drawn(shape)} for _ in range(3)]
    options = dict(min_dim_size_to_factor=2) if rule == "Adafactor" else {}
    agree(rule, steps[0], steps[1:], weight_decay=0.1, **options, moves=False, lockstep=True)
