"""What concerns a whole step: what is not finite, spikes, a limit for all gradients together, and mixtures of rules."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tolerances
from optax_runs import GRADS, MADE, PARAMS, assert_alike, compiled, every_function, run, same_bits, take_step
from spiked import KINDS, STEPS, draw, factors_by_hand

import thalweg.numpy
from thalweg.errors import OptionError, ParameterError, StateError, UnusedOverrideWarning
from thalweg.optax import (
    adamw,
    export_state,
    import_state,
    kron,
    lamb,
    lars,
    mixture,
    sgd,
    state_specs,
    stats,
    with_stats,
)
from thalweg.rules import Spikes

pytestmark = pytest.mark.slow  # many small programs are compiled


@every_function
def test_one_bad_element_leaves_all_parameters_state_and_counts_as_they_were(name: str) -> None:
    """Also where gradients are clipped, of zero too."""
    tx = MADE[name](0.1, on_nonfinite="skip", max_grad_norm=100.0)
    update = compiled(tx.update)
    _, first = update(jax.tree.map(jnp.zeros_like, GRADS), tx.init(PARAMS), PARAMS)
    assert (first.count, first.skipped) == (1, 0)
    state = first
    for number, (key, place, bad) in enumerate((("w", (1, 2), jnp.nan), ("b", (0,), -jnp.inf)), start=1):
        updates, state = update({**GRADS, key: GRADS[key].at[place].set(bad)}, state, PARAMS)
        assert all((x == 0).all() for x in jax.tree.leaves(updates))
        assert (state.count, state.skipped, state.skipped.dtype) == (1, number, jnp.int32)
    assert same_bits(state._replace(skipped=None), first._replace(skipped=None))
    found, state = update(GRADS, state, PARAMS)
    assert same_bits(found, update(GRADS, first, PARAMS)[0])
    assert (state.count, state.skipped) == (2, 2)
    assert update._cache_size() == 1


def test_a_float16_parameter_that_would_overflow_is_not_finite() -> None:
    params, grads = {"w": jnp.full((4, 3), 60000.0, jnp.float16)}, {"w": jnp.full((4, 3), -1.0, jnp.float16)}
    updates, state = take_step(lars(1e6, on_nonfinite="skip"), params, grads)
    assert (state.count, state.skipped) == (0, 1)
    assert (updates["w"] == 0).all()


def test_clipping_by_the_joint_norm_is_that_of_optax_before() -> None:
    updates, state = take_step(MADE["adafactor"](0.1, max_grad_norm=jnp.array(0.5)))
    expected, (_, other) = take_step(optax.chain(optax.clip_by_global_norm(0.5), MADE["adafactor"](0.1)))
    assert_alike((updates, state), (expected, other), tolerances.FLOAT32)
    assert optax.tree.norm(GRADS) > 0.5


@pytest.mark.parametrize("kind", ["skip", "clip"])
def test_a_mixture_has_one_norm_and_spikes_are_counted(kind: str) -> None:
    """tests/optax/test_agreements.py has the numbers of one rule."""
    options: Any = dict(spikes=KINDS[kind], max_grad_norm=20.0)
    start = jax.tree.map(jnp.asarray, draw(0))
    found, state = run(mixture([("a", adamw(0.1)), ("b", adamw(0.1))], **options), start, draw, STEPS)
    expected, alone = run(with_stats(adamw(0.1, **options)), start, draw, STEPS)
    assert_alike(found, expected, tolerances.FLOAT64)
    factors = factors_by_hand(KINDS[kind])
    assert stats(alone)["a"]["spikes"] == state.spikes[0] == sum(f != 1.0 for f in factors)
    assert alone.inner_state.count == STEPS - factors.count(None)
    assert state.skipped == alone.inner_state.skipped == (factors.count(None) or None)
    with pytest.raises(OptionError, match=r"spikes concerns the whole step: give it to mixture\(\)"):
        mixture([("*", adamw(0.1, spikes=True))])


def test_state_of_another_window_is_refused() -> None:
    state = lamb(0.1, spikes=True).init(PARAMS)
    with pytest.raises(StateError, match="spikes has window=8, and the norms of 128 steps are kept"):
        lamb(0.1, spikes=Spikes(window=8)).update(PARAMS, state, PARAMS)
    with pytest.raises(StateError, match="not a state of this optimizer"):
        lamb(0.1).update(PARAMS, state, PARAMS)


# ---- mixtures


def drawn(seed: int) -> Any:
    random = np.random.default_rng(seed)
    layers = [{"w": random.normal(size=(4, 3)), "b": random.normal(size=3)} for _ in range(2)]
    return jax.tree.map(jnp.asarray, {"layers": layers, "scale": random.normal(size=())})


def stepped(solver: Any, steps: int = 2) -> tuple[Any, Any]:
    return run(solver, drawn(0), drawn, steps)


def test_steps_are_those_of_optax_partition_inside_wrappers_too() -> None:
    entries = [("*.w", kron(0.01)), (re.compile("b$"), adamw(0.1)), (lambda name, p: p.ndim == 0, optax.sgd(0.5))]
    parts = {"w": kron(0.01), "b": adamw(0.1), "scale": optax.sgd(0.5)}
    labels = {"layers": [{"w": "w", "b": "b"}] * 2, "scale": "scale"}
    found, state = stepped(optax.chain(optax.identity(), mixture(entries)))
    assert same_bits(found, stepped(optax.partition(parts, labels))[0])
    specs = state_specs(state, found, jax.sharding.PartitionSpec())
    assert jax.tree.structure(specs) == jax.tree.structure(state)


def fill(solver: Any) -> Any:
    """A state that differs in every number."""
    state = jax.eval_shape(solver.init, drawn(0))
    return jax.tree.map(lambda x: np.arange(1, 1 + x.size).reshape(x.shape).astype(x.dtype), state)


def test_state_comes_back_and_that_of_other_rules_is_refused() -> None:
    solver, params = mixture([("*.w", kron(0.01)), ("*", adamw(0.1))]), drawn(0)
    state = fill(solver)
    exported = export_state(state, params)
    assert {name: rule for name, (rule, _) in exported["rules"].items()} == {
        **{f"layers.{i}.{key}": rule for i in (0, 1) for key, rule in (("w", "Kron"), ("b", "AdamW"))},
        "scale": "AdamW",
    }
    assert same_bits(import_state(solver.init(params), params, exported), state)
    with pytest.raises(StateError, match="has a state of Kron, which cannot be loaded into AdamW"):
        import_state(adamw(0.1).init(params), params, exported)
    with pytest.raises(StateError, match="has a state of AdamW, which cannot be loaded into Kron"):
        import_state(state, params, export_state(fill(adamw(0.1)), params))


def test_one_decision_about_what_is_not_finite() -> None:
    solver = mixture([("*.w", sgd(0.01, 0.9)), ("*", adamw(0.1))], on_nonfinite="skip")
    params, state = stepped(solver, 1)
    update = compiled(solver.update)
    updates, after = update({**drawn(3), "scale": jnp.asarray(jnp.nan)}, state, params)
    assert all((delta == 0).all() for delta in jax.tree.leaves(updates))
    assert (int(state.skipped), int(after.skipped)) == (0, 1)
    assert same_bits(after.inner_states, state.inner_states)
    updates, after = update(drawn(3), after, params)
    assert all((delta != 0).any() for delta in jax.tree.leaves(updates))
    assert int(after.skipped) == 1


#: Entries, options beside them, and what is wrong.
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    ([("*", thalweg.numpy.AdamW(0.1))], {}, r"a mixture is a list of \(pattern, transformation\)"),
    ([(3, sgd(0.1))], {}, "a pattern must be a glob"),
    ([("*", sgd(0.1, max_grad_norm=1.0))], {}, r"entry '\*': max_grad_norm concerns the whole step: give it to mix"),
    ([("*", sgd(0.1))], dict(on_nonfinite="raise"), "on_nonfinite must be"),
]


@pytest.mark.parametrize(("entries", "options", "said"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_no_mixture_is_refused(entries: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        mixture(entries, **options)


def test_parameters_and_entries_without_one_another_are_told() -> None:
    with pytest.raises(ParameterError, match=r"no entry of this mixture matches 'layers\.0\.b', .* 'scale'"):
        mixture([("*.w", sgd(0.1))]).init(drawn(0))
    with pytest.warns(UnusedOverrideWarning, match="entries of the mixture that match no parameter: 'nothing'"):
        mixture([("nothing", sgd(0.1)), ("*", sgd(0.1))]).init(drawn(0))
