"""Mixtures: several transformations as one, by the paths of parameters."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax_runs import compiled, error, run, same_bits
from tolerances import FLOAT64

import thalweg.numpy
from thalweg.errors import OptionError, ParameterError, StateError, UnusedOverrideWarning
from thalweg.optax import adamw, export_state, import_state, kron, mixture, sgd, state_specs, transformation
from thalweg.rules import LAMB

pytestmark = pytest.mark.slow  # many small programs are compiled


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


def test_steps_under_one_limit_are_those_of_numpy() -> None:
    solver = mixture([("*.w", kron(0.01)), ("*", transformation(LAMB, 0.1))], max_grad_norm=0.5)
    found, state = stepped(solver, 3)
    optimizers = {True: thalweg.numpy.Kron(lr=0.01), False: thalweg.numpy.LAMB(lr=0.1)}

    def flat(tree: Any) -> dict[str, Any]:
        layers = {f"layers.{i}.{key}": np.array(p) for i, each in enumerate(tree["layers"]) for key, p in each.items()}
        return {**layers, "scale": np.array(tree["scale"])}

    params = flat(drawn(0))
    for seed in range(1, 4):
        grads = flat(drawn(seed))
        factor = 1 / max(1.0, np.sqrt(sum((g**2).sum() for g in grads.values())) / 0.5)
        for is_matrix, optimizer in optimizers.items():
            names = [name for name in params if name.endswith(".w") == is_matrix]
            optimizer.step({name: params[name] for name in names}, {name: grads[name] * factor for name in names})
    assert error(flat(found), params, flat(drawn(0))) <= FLOAT64
    assert {name: rule for name, (rule, _) in export_state(state, found)["rules"].items()} == {
        name: "Kron" if name.endswith(".w") else "LAMB" for name in params
    }


def fill(solver: Any) -> Any:
    """A state that differs in every number."""
    state = jax.eval_shape(solver.init, drawn(0))
    return jax.tree.map(lambda x: np.arange(1, 1 + x.size).reshape(x.shape).astype(x.dtype), state)


def test_state_comes_back_and_that_of_other_rules_is_refused() -> None:
    solver, params = mixture([("*.w", kron(0.01)), ("*", adamw(0.1))]), drawn(0)
    state = fill(solver)
    exported = export_state(state, params)
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
