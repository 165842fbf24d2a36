"""Solvers of thalweg.optax equal the optimizers of thalweg.numpy, in parameters and in state."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import cases
import numpy as np
import pytest
from cases import ADAFACTOR, KRON, LAMB, LARS
from optax_runs import assert_equal, problem, scanned, translated

jax = pytest.importorskip("jax")
pytest.importorskip("optax")

import jax.numpy as jnp  # noqa: E402

import thalweg.numpy as reference  # noqa: E402
import thalweg.optax as ours  # noqa: E402
from thalweg.errors import OptionError  # noqa: E402

pytestmark = pytest.mark.slow

SHAPES: Mapping[str, Any] = {
    "layers": [{"w": (6, 4), "bias": (7,)}, {"w": (6, 4)}],
    "wide": (1, 5),
    "deep": (3, 4, 5),
    "conv": (2, 3, 3, 2),
    "gain": (),
}
#: Of rules that take longer to compile, or matrices alone.
OTHER_SHAPES = {
    "Kron": {"layers": [{"w": (6, 4), "bias": (7,)}, {"w": (6, 4)}], "deep": (3, 2, 4)},
    "Muon": {"tall": (12, 5), "wide": (5, 12), "small": (3, 3)},
}
STACKS = {"experts": (3, 6, 4), "others": (3, 6, 4), "biases": (3, 4)}
#: Factors of one shape are stepped together, whatever the shapes of their parameters, and vectors with zeros.
SEVERAL = {"a": (6, 8), "b": (6, 8), "c": (13, 6), "d": (6, 6), "e": (4, 3, 5), "f": (8,), "g": (3,), "h": (1,)}
RATES = {"LARS": LARS.lr, "LAMB": LAMB.lr, "Adafactor": ADAFACTOR.lr, "Kron": KRON.lr, "Muon": 0.02}
#: What differs in defaults: optax has trust ratios for vectors.
AS_OPTAX: dict[str, dict[str, Any]] = {"LAMB": dict(exempt=None), "Muon": dict(variant="optax")}


class Row(NamedTuple):
    rule: str
    text: str
    #: Options of thalweg.numpy.
    options: dict[str, Any]
    #: Those of thalweg.optax, where they are not the same under other names.
    mine: dict[str, Any] | None = None
    shapes: Any = None


#: A glob, a regular expression and a predicate; where several match, later ones win.
OVERRIDES: list[tuple[Any, dict[str, Any]]] = [
    ("layers.*", dict(lr_scale=0.5)),
    (re.compile(r"bias$|^gain$"), dict(weight_decay=0.0)),
    (lambda name, p: p.ndim == 3, dict(weight_decay=0.3, lr_scale=2.0)),
    ("layers.1.w", dict(lr_scale=0.0)),
]
LARS_SCHEDULES = dict(
    lr=lambda t: 5.0 / t,
    momentum=lambda t: 0.9 - 0.5 / t,
    trust_coefficient=lambda t: 0.01 / t,
    eps=lambda t: 0.1 * t,
)
KRON_SCHEDULES = dict(lr=lambda t: 0.1 / t, momentum=lambda t: 0.9 - 0.5 / t, precond_lr=lambda t: 0.5 / t)
#: By the names of numpy and of optax.
PAIRED = dict(
    LAMB=(
        dict(lr=lambda t: 0.02 / t, betas=lambda t: (0.9 - 0.5 / t, 0.99), eps_root=lambda t: 0.1 / t),
        dict(lr=lambda t: 0.02 / t, b1=lambda t: 0.9 - 0.5 / t, eps_root=lambda t: 0.1 / t),
    ),
    Adafactor=(
        dict(
            lr=lambda t: 0.05 / t,
            beta2_decay=lambda t: 0.8 - 0.3 / t,
            clip_threshold=lambda t: 1 + 1.0 / t,
            eps=lambda t: (0.01 / t, 0.5),
        ),
        dict(
            lr=lambda t: 0.05 / t,
            decay_rate=lambda t: 0.8 - 0.3 / t,
            clipping_threshold=lambda t: 1 + 1.0 / t,
            eps=lambda t: 0.01 / t,
        ),
    ),
)
#: What is paired with a schedule there, and a number of its own here.
BESIDE = {"LAMB": dict(b2=0.99), "Adafactor": dict(min_scale=0.5)}


def count_from_0(schedules: dict[str, Any]) -> dict[str, Any]:
    return {name: lambda count, own=own: own(count + 1) for name, own in schedules.items()}


ROWS = [
    *(Row(case.name, text, own) for case in (LARS, LAMB, ADAFACTOR, KRON) for text, own in case.options.items()),
    *(Row(name, "maximize", dict(maximize=True)) for name in ("LARS", "LAMB", "Adafactor")),
    *(Row(name, "max_grad_norm", dict(max_grad_norm=0.5)) for name in ("LARS", "LAMB", "Adafactor")),
    *(Row(name, "state in float32", dict(state_dtype="float32")) for name in ("LARS", "LAMB")),
    *(Row(name, "overrides", dict(weight_decay=0.1, overrides=OVERRIDES)) for name in ("LARS", "LAMB", "Adafactor")),
    *(Row(name, "stacks", dict(stacked_axes=1), shapes=STACKS) for name in ("LARS", "LAMB")),
    Row("LARS", "zero_ratio", dict(zero_ratio=0.01)),
    Row("LAMB", "standard overrides", dict(weight_decay=0.1, overrides="standard")),
    Row("Adafactor", "stacks", dict(stacked_axes=1, min_dim_size_to_factor=2), shapes=STACKS),
    Row("Adafactor", "pair of eps", dict(eps=(1e-4, 2.0))),
    Row("Adafactor", "decay_rate", dict(beta2_decay=0.5, clip_threshold=0.5)),
    Row("Adafactor", "warmup", dict(relative_step=True, warmup_init=True)),
    Row("Adafactor", "scale only when relative", dict(scale_parameter="relative")),
    Row("LARS", "schedules", LARS_SCHEDULES, count_from_0(LARS_SCHEDULES)),
    Row("Kron", "schedules", KRON_SCHEDULES, count_from_0(KRON_SCHEDULES)),
    *(Row(name, "schedules", own, count_from_0(mine) | BESIDE[name]) for name, (own, mine) in PAIRED.items()),
    *(Row("Kron", name, dict(variant=name, weight_decay=0.1)) for name in ("polyak", "kron_torch")),
    Row(
        "Kron",
        "overrides and seed",
        dict(
            seed=7,
            overrides=[
                ("layers.0.*", dict(precond_lr=0.3)),
                ("*.bias", dict(lr_scale=0.5)),
                ("deep", dict(stacked_axes=1)),
            ],
            max_grad_norm=2.0,
            max_skew=None,
        ),
    ),
    *(
        Row(
            "Kron",
            f"several shapes, {g}",
            dict(geometry=g, block_size=6, max_size_dense=9, damping=0.01),
            None,
            SEVERAL,
        )
        for g in ("procrustes", "quad", "eq")
    ),
    Row(  # a batch of stacks; the noise of each leaf is its own
        "Kron",
        "large leaves",
        dict(stacked_axes=1, damping=0.01, max_grad_norm=2.0),
        shapes={"first": (2, 5, 6600), "second": (2, 5, 6600)},
    ),
    Row(
        "Muon",
        "large leaves",
        dict(normalize="rows", split=2, weight_decay=0.1),
        shapes=dict.fromkeys(("first", "second", "third"), (6, 11000)),
    ),
    Row(
        "Muon",
        "blocks",
        dict(split=3, overrides=[("wide", dict(split=(8, 2, 2), split_axis=1, transposed=True, scaling="original"))]),
    ),
    Row("Muon", "rows", dict(normalize="rows", transposed=True)),
    Row(
        "Muon",
        "rows of blocks",
        dict(normalize="rows", transposed=True, split=3, overrides=[("wide", dict(split_axis=1))]),
    ),
]
DAY = {
    ("LARS", "overrides"),
    ("LAMB", "schedules"),
    ("Adafactor", "stacks"),
    ("Kron", "several shapes, procrustes"),
    ("Muon", "rows of blocks"),
}


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=f"{row.rule}-{row.text}", marks=() if row[:2] in DAY else pytest.mark.nightly)
        for row in ROWS
    ],
)
def test_equals_the_numpy_front_end(row: Row) -> None:
    """Schedules count from 0 where those of numpy count from 1."""
    lr = None if row.options.get("warmup_init") else RATES[row.rule]
    given = {"lr": lr, **row.options}
    theirs = getattr(reference, row.rule)(engine="reference", **AS_OPTAX.get(row.rule, {}), **given)
    options = translated(row.rule, row.options) if row.mine is None else {**translated(row.rule, {}), **row.mine}
    mine = getattr(ours, row.rule.lower())(options.pop("lr", lr), **options)
    assert_equal(mine, theirs, row.shapes or OTHER_SHAPES.get(row.rule, SHAPES))


MADE = [(case, text, options) for case in cases.CASES if case.rule.OPTAX for text, options in case.options.items()]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("case", "text", "options"), MADE[::8], ids=[f"{case.name}-{text}" for case, text, _ in MADE[::8]]
)
def test_what_is_made_of_a_rule_equals_the_numpy_front_end(case: cases.Case, text: str, options: dict) -> None:
    theirs = getattr(reference, case.name)(lr=case.lr, engine="reference", **options)
    assert_equal(ours.transformation(case.rule, case.lr, **options), theirs, SHAPES)


def test_a_wrong_option_would_be_noticed() -> None:
    theirs = reference.LAMB(lr=0.02, engine="reference", betas=(0.9, 0.999))
    with pytest.raises(AssertionError):
        assert_equal(ours.lamb(0.02, b2=0.9990001), theirs, {"w": (6, 4)})


# ---- psgd-jax's names of options

#: Theirs and ours.
PSGD_JAX: dict[str, tuple[str, Any]] = {
    "b1": ("momentum", 0.7),
    "preconditioner_lr": ("precond_lr", 0.3),
    "preconditioner_update_probability": ("precond_update_probability", lambda c: 1.0 / (c + 1)),
    "preconditioner_init_scale": ("init_scale", 0.1),
    "max_size_triangular": ("max_size_dense", 5),
    "mu_dtype": ("momentum_dtype", jnp.bfloat16),
    "scanned_layers": ("stacked_axes", {"w": True}),
}


def program(**options: Any) -> str:
    """Steps of psgd-jax's rule as they are traced, first state included."""
    params, grads = problem({"w": (6, 4)}, steps=2, dtype=np.float32)
    solver = ours.kron(0.02, variant="kron_torch", merge=None, **options)
    return str(jax.make_jaxpr(lambda p, g: scanned(solver, p, g))(params, grads))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "b1" else pytest.mark.nightly) for name in PSGD_JAX]
)
def test_psgd_jax_names_mean_the_same_as_ours(name: str) -> None:
    own, value = PSGD_JAX[name]
    assert program(**{name: value}) == program(**{own: value}) != program()


def test_giving_both_names_of_an_option_is_refused() -> None:
    for name, (own, value) in PSGD_JAX.items():
        for both in ((name, own), (own, name)):
            with pytest.raises(OptionError, match=f"{name} is psgd-jax's name of {own}"):
                ours.kron(0.02, **dict.fromkeys(both, value))


def test_the_variant_has_a_triangular_factor_for_each_axis() -> None:
    params = {"deep": jnp.ones((3, 2, 4)), "bias": jnp.ones(5)}
    state = jax.eval_shape(ours.kron(0.02, variant="kron_torch", merge=None).init, params)
    assert [q.shape for q in state.Q["deep"]] == [(3, 3), (2, 2), (4, 4)]
    assert [q.shape for q in state.Q["bias"]] == [(5,)]
