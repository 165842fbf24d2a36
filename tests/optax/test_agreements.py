"""What steps once were wrong with, beside the reference: stacks of alike leaves, overrides, schedules, limits.

tests/engines/test_agree.py draws options and shapes of every rule; these rows are what it would seldom draw.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agree import agree
from composed import Damped
from own_rules import Layerwise
from spiked import KINDS

from thalweg import OptionError
from thalweg.optax import kron, lamb, muon, state_specs
from thalweg.rules import AdamW, around

pytestmark = pytest.mark.slow  # each row compiles two programs

NESTED = {"layers.0.w": (6, 4), "layers.0.bias": (7,), "layers.1.w": (6, 4), "deep": (3, 4, 5), "gain": ()}
STACKS = {"experts": (3, 6, 4), "others": (3, 6, 4), "biases": (3, 4)}
#: Factors of one shape are stepped together, whatever the shapes of their parameters, and vectors with zeros.
SEVERAL = {"a": (6, 8), "b": (6, 8), "c": (13, 6), "e": (4, 3, 5), "f": (8,), "g": (3,), "h": (1,)}
ALIKE = {"first": (64, 128), "second": (64, 128), "bias": (64,)}
MATRICES = {"tall": (12, 5), "wide": (5, 12), "small": (3, 3)}
#: A glob, a regular expression and a predicate; where several match, later ones win.
OVERRIDES: list[tuple[Any, dict[str, Any]]] = [
    ("layers.*", dict(lr_scale=0.5)),
    (re.compile(r"bias$|^gain$"), dict(weight_decay=0.0)),
    (lambda name, p: p.ndim == 3, dict(weight_decay=0.3, lr_scale=2.0)),
    ("layers.1.w", dict(lr_scale=0.0)),
]
ENGINES, WHOLE = ("optax update", "optax native"), ("Kron", "Muon")
KRON: dict[str, Any] = dict(lr=0.02, precond_update_probability=1.0, damping=0.01)
MUON: dict[str, Any] = dict(lr=0.02, ns_dtype="float32")


def narrow_one(params: dict[str, Any], grads: list[dict[str, Any]]) -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    for tree in (params, *grads):
        tree["first"] = tree["first"].astype(bfloat16)


def put_inf(params: dict[str, Any], grads: list[dict[str, Any]]) -> None:
    grads[1]["first"][3, 5] = np.inf


def put_inf_and_large(params: dict[str, Any], grads: list[dict[str, Any]]) -> None:
    """A number that is not finite, and one whose square is not."""
    grads[1]["first"][3, 5], grads[2]["first"][3, 5] = np.inf, 1e30


def put_spike(params: dict[str, Any], grads: list[dict[str, Any]]) -> None:
    grads[6]["first"] *= 50


ROWS: dict[str, tuple[Any, dict[str, tuple[int, ...]], dict[str, Any]]] = {
    "alike leaves of two dtypes": ("LAMB", ALIKE, dict(lr=0.02, weight_decay=0.1, spoil=narrow_one)),
    "alike leaves in eight bits by chance": (
        "LAMB",
        ALIKE,
        dict(lr=0.01, state_dtype="int8", state_rounding="stochastic", max_grad_norm=0.5),
    ),
    "rounding by chance": ("LAMB", ALIKE, dict(lr=1e-3, dtype="bfloat16", rounding="stochastic", seed=7)),
    "small gradients of float16": ("AdamW", ALIKE, dict(lr=1e-3, dtype="float16", scale=1e-5)),
    "rounding with a record": ("SGD", ALIKE, dict(lr=1e-3, dtype="bfloat16", rounding="compensated", maximize=True)),
    "overrides": ("LAMB", NESTED, dict(lr=0.02, weight_decay=0.1, overrides=OVERRIDES)),
    "stacked axes that are factored": ("Adafactor", STACKS, dict(lr=0.05, stacked_axes=1, min_dim_size_to_factor=2)),
    "no rate but its own": ("Adafactor", NESTED, dict(lr=None, relative_step=True, warmup_init=True)),
    "schedules": (
        "LAMB",
        NESTED,
        dict(lr=lambda t: 0.02 / t, betas=lambda t: (0.9 - 0.5 / t, 0.99), eps_root=lambda t: 0.1 / t),
    ),
    "schedules of a pair, of alike leaves": (
        "Adafactor",
        NESTED,
        dict(
            lr=lambda t: 0.05 / t,
            beta2_decay=lambda t: 0.8 - 0.3 / t,
            eps=lambda t: (0.01 / t, 0.5),
            min_dim_size_to_factor=4,
            momentum=0.9,
        ),
    ),
    "schedules of matrices": (
        "Kron",
        {"w": (6, 4)},
        {**KRON, "lr": lambda t: 0.1 / t, "momentum": lambda t: 0.9 - 0.5 / t, "precond_lr": lambda t: 0.5 / t},
    ),
    "a limit that is kept": ("SGD", NESTED, dict(lr=0.1, momentum=0.9, max_grad_norm=1e3)),
    "a limit in float64": (
        "SGD",
        NESTED,
        dict(dtype="float64", gradients="bfloat16", lr=0.1, momentum=0.9, max_grad_norm=0.5),
    ),
    "a limit of what is not finite": ("SGD", ALIKE, dict(lr=0.1, momentum=0.9, max_grad_norm=0.5, spoil=put_inf)),
    "a limit of what would overflow": ("SGD", ALIKE, dict(dtype="float16", lr=0.1, scale=1e3, max_grad_norm=1.0)),
    "spikes that are skipped": ("AdamW", ALIKE, dict(lr=0.1, steps=8, spikes=KINDS["skip"], spoil=put_spike)),
    "spikes by quantile": ("AdamW", ALIKE, dict(lr=0.1, steps=8, spikes=KINDS["quantile"], spoil=put_spike)),
    "codes and a record that are left as they were": (
        "LAMB",
        {"first": (64, 128)},
        dict(
            lr=0.01,
            dtype="bfloat16",
            state_dtype="int8",
            rounding="compensated",
            on_nonfinite="skip",
            spoil=put_inf_and_large,
            steps=3,
        ),
    ),
    **{
        f"factors of several shapes, {geometry}": (
            "Kron",
            SEVERAL,
            {**KRON, "geometry": geometry, "block_size": 6, "max_size_dense": 9, "clip": 0.1, "clip_mode": "rms"},
        )
        for geometry in ("procrustes", "eq")
    },
    "factors by overrides, seed": (
        "Kron",
        {**NESTED, "deep": (3, 2, 4)},
        {
            **KRON,
            "seed": 7,
            "overrides": [
                ("layers.0.*", dict(precond_lr=0.3)),
                ("*.bias", dict(lr_scale=0.5)),
                ("deep", dict(stacked_axes=1)),
            ],
            "max_skew": None,
        },
    ),
    "large stacks of factors": ("Kron", dict.fromkeys(("first", "second"), (2, 5, 6600)), {**KRON, "stacked_axes": 1}),
    "large matrices in blocks": (
        "Muon",
        dict.fromkeys(("first", "second"), (6, 11000)),
        dict(**MUON, normalize="rows", split=2, weight_decay=0.1),
    ),
    "blocks by overrides": (
        "Muon",
        MATRICES,
        dict(
            **MUON,
            split=3,
            overrides=[("wide", dict(split=(8, 2, 2), split_axis=1, transposed=True, scaling="original"))],
        ),
    ),
    "rows of blocks": (
        "Muon",
        MATRICES,
        dict(**MUON, normalize="rows", transposed=True, split=3, overrides=[("wide", dict(split_axis=1))]),
    ),
    "a rule of one's own": (Layerwise, NESTED, dict(lr=0.1, weight_decay=0.1)),
    "around a rule, of one's own": (around(AdamW, Damped), NESTED, dict(lr=0.05, memory=0.8)),
}


#: Products of matrices are XLA's, by whatever name a step is called.
SERVED = [(engine, row) for row in ROWS for engine in ENGINES if engine == "optax update" or ROWS[row][0] not in WHOLE]


@pytest.mark.parametrize(("engine", "row"), SERVED)
def test_steps_are_those_of_the_reference(engine: str, row: str) -> None:
    rule, shapes, options = ROWS[row]
    agree(engine, rule, shapes, **{"steps": 2, **options})


# ---- programs


def count_equations(make: Any, shapes: dict[str, tuple[int, ...]]) -> Counter[str]:
    """How often each primitive stands in the program of a step."""
    params, solver = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}, make(0.01)
    program = jax.make_jaxpr(solver.update)(params, jax.eval_shape(solver.init, params), params)
    return Counter(re.findall(r" = (\w+)", str(program)))


@pytest.mark.parametrize("make", [kron, muon])
def test_programs_hardly_grow_with_layers(make: Any) -> None:
    few, many = (count_equations(make, {f"layer{i}": (264, 256) for i in range(layers)}) for layers in (2, 8))
    for kind in ("dot_general", "cond", "xor"):
        assert many[kind] == few[kind], f"{kind} by layer"
    # what goes element by element before and after products, and into stacks and out of them
    assert many.total() - few.total() <= 6 * 30


# ---- what the functions add to the rules


def test_both_names_of_an_option_mean_the_same_and_go_not_together() -> None:
    """psgd-jax's names and ours: the steps are traced to the same program."""
    names: dict[str, tuple[str, Any]] = {
        "b1": ("momentum", 0.7),
        "preconditioner_lr": ("precond_lr", 0.3),
        "preconditioner_update_probability": ("precond_update_probability", lambda c: 1.0 / (c + 1)),
        "preconditioner_init_scale": ("init_scale", 0.1),
        "max_size_triangular": ("max_size_dense", 5),
        "mu_dtype": ("momentum_dtype", jnp.bfloat16),
        "scanned_layers": ("stacked_axes", {"w": True}),
    }
    params = {"w": jnp.ones((6, 4), jnp.float32)}

    def program(**options: Any) -> str:
        solver = kron(0.02, variant="kron_torch", merge=None, **options)
        return str(jax.make_jaxpr(lambda p: solver.update(p, solver.init(p), p))(params))

    plain = program()
    for theirs, (ours, value) in names.items():
        assert program(**{theirs: value}) == program(**{ours: value}) != plain
        with pytest.raises(OptionError, match=f"{theirs} is psgd-jax's name of {ours}"):
            kron(0.02, **{theirs: value, ours: value})


def test_the_variant_of_kron_torch_has_a_triangular_factor_for_each_axis() -> None:
    params = {"deep": jnp.ones((3, 2, 4)), "bias": jnp.ones(5)}
    state = jax.eval_shape(kron(0.02, variant="kron_torch", merge=None).init, params)
    assert [q.shape for q in state.Q["deep"]] == [(3, 3), (2, 2), (4, 4)]
    assert [q.shape for q in state.Q["bias"]] == [(5,)]


def test_fields_are_added_to_the_state_only_where_they_are_needed() -> None:
    params = {name: jnp.zeros(shape, jnp.float32) for name, shape in ALIKE.items()}
    plain, lean = lamb(0.01).init(params), lamb(0.01, state_dtype="int8").init(params)
    assert set(lean._fields) - set(plain._fields) == {"exp_avg_scale", "exp_avg_sq_scale"}
    assert lean.exp_avg_scale["first"].shape == (64, 2)
    assert lean.exp_avg_scale["bias"] is None
    made = state_specs(lean, params, dict.fromkeys(params, jax.sharding.PartitionSpec("x")))
    assert made.exp_avg_scale["first"] == jax.sharding.PartitionSpec("x", None)
