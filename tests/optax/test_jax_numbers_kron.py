"""thalweg.optax.kron equals thalweg.numpy.Kron in parameters and state, and understands psgd-jax's names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import KRON
from lanes import one_in
from optax_runs import assert_equal, compiled, problem, scanned

jax = pytest.importorskip("jax")
pytest.importorskip("optax")

import jax.numpy as jnp  # noqa: E402

from thalweg.errors import OptionError  # noqa: E402
from thalweg.numpy import Kron  # noqa: E402
from thalweg.optax import kron  # noqa: E402

SHAPES = {"layers": [{"w": (6, 4), "bias": (7,)}, {"w": (6, 4)}], "deep": (3, 2, 4)}
ONE = {"w": (6, 4)}


@pytest.mark.slow
@pytest.mark.parametrize(("text", "options"), one_in(12, KRON.options.items()))
def test_equals_the_numpy_front_end(text: str, options: dict) -> None:
    assert_equal(kron(KRON.lr, **options), Kron(lr=KRON.lr, engine="reference", **options), SHAPES)


@pytest.mark.slow
@pytest.mark.parametrize("variant", one_in(2, ["polyak", "kron_torch"]))
def test_variants_equal_those_of_the_numpy_front_end(variant: str) -> None:
    options = dict(variant=variant, weight_decay=0.1)
    assert_equal(kron(KRON.lr, **options), Kron(lr=KRON.lr, engine="reference", **options), SHAPES)


@pytest.mark.nightly
def test_overrides_seed_and_stacks_equal_those_of_the_numpy_front_end() -> None:
    overrides = [("layers.0.*", dict(precond_lr=0.3)), ("*.bias", dict(lr_scale=0.5)), ("deep", dict(stacked_axes=1))]
    options = dict(seed=7, overrides=overrides, max_grad_norm=2.0, max_skew=None)
    assert_equal(kron(KRON.lr, **options), Kron(lr=KRON.lr, engine="reference", **options), SHAPES)


@pytest.mark.slow
def test_schedules_equal_those_of_the_numpy_front_end() -> None:
    theirs = Kron(
        lr=lambda t: 0.1 / t, engine="reference", momentum=lambda t: 0.9 - 0.5 / t, precond_lr=lambda t: 0.5 / t
    )
    mine = kron(lambda c: 0.1 / (c + 1), momentum=lambda c: 0.9 - 0.5 / (c + 1), precond_lr=lambda c: 0.5 / (c + 1))
    assert_equal(mine, theirs, SHAPES)


PSGD_JAX: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "b1": (dict(b1=0.7), dict(momentum=0.7)),
    "preconditioner_lr": (dict(preconditioner_lr=0.3), dict(precond_lr=0.3)),
    "preconditioner_update_probability": (
        dict(preconditioner_update_probability=0.4),
        dict(precond_update_probability=0.4),
    ),
    "preconditioner_update_probability by count": (
        dict(preconditioner_update_probability=lambda c: 1.0 / (c + 1)),
        dict(precond_update_probability=lambda c: 1.0 / (c + 1)),
    ),
    "preconditioner_init_scale": (dict(preconditioner_init_scale=0.1), dict(init_scale=0.1)),
    "max_size_triangular": (dict(max_size_triangular=5), dict(max_size_dense=5)),
    "mu_dtype": (dict(mu_dtype=jnp.bfloat16), dict(momentum_dtype="bfloat16")),
    "scanned_layers": (
        dict(scanned_layers={"w": True}),
        dict(stacked_axes={"w": 1}),
    ),
}


def program(**options: Any) -> str:
    """Steps of psgd-jax's rule as they are traced, first state included."""
    params, grads = problem(ONE, steps=2, dtype=np.float32)
    transformation = kron(0.02, variant="kron_torch", merge=None, **options)
    return str(jax.make_jaxpr(lambda p, g: scanned(transformation, p, g))(params, grads))


@pytest.mark.parametrize("name", one_in(3, PSGD_JAX))
def test_psgd_jax_names_mean_the_same_as_ours(name: str) -> None:
    theirs, mine = (program(**options) for options in PSGD_JAX[name])
    assert theirs == mine
    assert theirs != program(), "it has no effect"


@pytest.mark.parametrize("name", PSGD_JAX)
def test_giving_both_names_of_an_option_is_refused(name: str) -> None:
    theirs, mine = PSGD_JAX[name]
    (given,), (own,) = theirs, mine
    for both in ({**theirs, **mine}, {**mine, **theirs}):
        with pytest.raises(OptionError) as refusal:
            kron(0.02, **both)
        assert f"{given} is psgd-jax's name of {own}" in str(refusal.value)


@pytest.mark.slow
def test_the_variant_has_a_triangular_factor_for_each_axis() -> None:
    params, grads = problem({"deep": (3, 2, 4), "bias": (5,)}, steps=3, dtype=np.float32)
    _, state = compiled(kron(0.02, variant="kron_torch", merge=None), params, grads)
    assert [q.shape for q in state.Q["deep"]] == [(3, 3), (2, 2), (4, 4)]
    assert [q.shape for q in state.Q["bias"]] == [(5,)]
    for q in state.Q["deep"]:
        assert np.array_equal(q, np.triu(q))
        assert not np.array_equal(q, np.diag(np.diag(q)))
