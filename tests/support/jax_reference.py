"""The optimizers of thalweg.optax beside those of thalweg.numpy: the same options, the same parameters and state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jax_trees import compiled, problem, pulled
from tolerances import FLOAT64, SPACE

#: Options of rules under their names in thalweg.optax, where these are others.
NAMES = {
    "Adafactor": {
        "beta2_decay": "decay_rate",
        "clip_threshold": "clipping_threshold",
        "weight_decay": "weight_decay_rate",
        "scale_parameter": "multiply_by_parameter_scale",
        "momentum_dtype": "dtype_momentum",
    }
}
#: Options of a pair of numbers that thalweg.optax has apart.
PAIRS = {"LAMB": {"betas": ("b1", "b2")}, "Adafactor": {"eps": ("eps", "min_scale")}}
#: The defaults of rules where thalweg.optax has those of optax.
DEFAULTS = {
    "LARS": {"norm_mode": "paper"},
    "Adafactor": {"relative_step": False, "weight_decay_mode": "alpha", "decay_rate": 0.8},
}


def translated(rule: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a rule as thalweg.optax calls them."""
    # without a trust ratio there are no norms
    result: dict[str, Any] = dict(DEFAULTS.get(rule, {})) if options.get("trust", True) else {}
    for name, value in options.items():
        if name in PAIRS.get(rule, {}):
            result |= dict(zip(PAIRS[rule][name], value, strict=True))
        else:
            result[NAMES.get(rule, {}).get(name, name)] = value
    if rule == "Adafactor" and result.get("momentum") is not None:
        result.setdefault("dtype_momentum", "float64")
    return result


def by_name(tree: Any) -> dict[str, Any]:
    """The leaves of a tree under their paths, as numpy's arrays of their own."""
    import jax

    pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.array(leaf) for path, leaf in pairs}


def state_by_name(state: Any, params: Any) -> dict[str, dict[str, Any]]:
    """The state of each parameter under the keys of checkpoints."""
    import jax

    names, structure = list(by_name(params)), jax.tree.structure(params)
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    for field in state._fields:
        if field in ("count", "skipped"):
            continue
        for name, value in zip(names, structure.flatten_up_to(getattr(state, field)), strict=True):
            if isinstance(value, tuple):
                found[name] |= {f"{field}_{i}": np.asarray(part) for i, part in enumerate(value)}
            elif value is not None:
                found[name][field] = np.asarray(value)
    return found


def reference(optimizer: Any, params: Any, grads: Any) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Parameters and state by name after all gradients, under an optimizer of thalweg.numpy."""
    current, noise = by_name(params), by_name(grads)
    for t in range(len(next(iter(noise.values())))):
        optimizer.step(current, pulled({name: n[t] for name, n in noise.items()}, current))
    return current, {name: {k: v for k, v in optimizer.state[name].items() if k != "step"} for name in current}


def assert_equal(mine: Any, optimizer: Any, shapes: Any, *, tolerance: float = FLOAT64) -> Any:
    """Both from the same start over 30 steps in float64; parameters, and every entry of the state."""
    params, grads = problem(shapes)
    expected, expected_state = reference(optimizer, params, grads)
    trained, state = compiled(mine, params, grads)
    found, first = by_name(trained), by_name(params)
    assert found.keys() == expected.keys()
    displacement = max(np.abs(expected[name] - first[name]).max(initial=0) for name in first)
    assert displacement > 0, "nothing moved: this comparison would prove nothing"
    for name in first:
        assert np.abs(found[name] - expected[name]).max(initial=0) < tolerance * displacement, name
    entries = state_by_name(state, params)
    for name, own in expected_state.items():
        assert entries[name].keys() == own.keys(), name
        for key, entry in own.items():
            assert entries[name][key].shape == entry.shape, (name, key)
            assert entries[name][key].dtype == entry.dtype, (name, key)
            size = max(1.0, np.abs(entry).max(initial=0))
            bound = SPACE["float64" if entry.dtype == np.float64 else "float32"] * size
            assert np.abs(entries[name][key] - entry).max(initial=0) <= bound, (name, key)
    return state
