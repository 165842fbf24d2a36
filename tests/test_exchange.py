"""State goes from any front end to any other without loss: three steps here and three there are six steps."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
from day import BY_DAY
from tolerances import FLOAT64

import thalweg.numpy
from thalweg import Spikes
from thalweg.errors import StateError
from thalweg.rules import RULES

SHAPES = {"layers.0.w": (20, 30), "layers.0.b": (7,), "layers.1.b": (7,), "conv": (3, 4, 5), "scale": ()}
CASES: dict[str, dict[str, Any]] = {
    "LARS": dict(lr=1.0, weight_decay=0.1),
    "LARS without state": dict(lr=1.0, momentum=0.0),
    "LAMB": dict(lr=0.01, weight_decay=0.1, exempt=None),
    "Adafactor": dict(lr=0.01, min_dim_size_to_factor=4, momentum=0.9),
    "Kron": dict(lr=0.01, precond_update_probability=0.4),
    "SGD under a limit of spikes": dict(lr=0.01, spikes=Spikes(window=4, z=0.1, action="clip")),
}
#: Cases in which state is kept in few bits, and the dtype of parameters.
KEPT = {"LAMB in 16 bits": "float32", "LAMB in 8 bits": "float32", "LAMB in 8 bits, compensated": "float16"}
OPTIONS = {
    **CASES,
    "LAMB in 16 bits": dict(lr=0.01, momentum_dtype="bfloat16"),
    "LAMB in 8 bits": dict(lr=0.01, state_dtype="int8"),
    "LAMB in 8 bits, compensated": dict(lr=0.01, state_dtype="int8", rounding="compensated"),
}


def drawn(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {name: np.asarray(rng.standard_normal(shape)) for name, shape in SHAPES.items()}


def in_few_bits(kept: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters and gradients."""
    pytest.importorskip("ml_dtypes")
    p, g = (np.random.default_rng(seed).standard_normal((64, 64)).astype(KEPT[kept]) for seed in (0, 1))
    return {"w": p}, {"w": g}


class Run(NamedTuple):
    """An optimizer over parameters of its own, which may go on from an exported state."""

    step: Callable[[Mapping[str, Any]], None]
    weights: Callable[[], dict[str, Any]]
    exported: Callable[[], dict[str, Any]]


def in_numpy(case: str, params: Mapping[str, Any], state: Any = None) -> Run:
    current = {name: p.copy() for name, p in params.items()}
    optimizer = getattr(thalweg.numpy, case.split()[0])(**OPTIONS[case])
    if state is not None:
        optimizer.load_state_dict(state)
    return Run(lambda grads: optimizer.step(current, grads), lambda: current, optimizer.state_dict)


def in_torch(case: str, params: Mapping[str, Any], state: Any = None) -> Run:
    import torch

    import thalweg.torch

    current = {name: torch.nn.Parameter(torch.tensor(p)) for name, p in params.items()}
    optimizer = getattr(thalweg.torch, case.split()[0])(current.items(), **OPTIONS[case])
    if state is not None:
        thalweg.torch.import_state(optimizer, state)

    def step(grads: Mapping[str, Any]) -> None:
        for name, p in current.items():
            p.grad = torch.tensor(grads[name])
        optimizer.step()

    def weights() -> dict[str, Any]:
        return {name: p.detach().numpy() for name, p in current.items()}

    return Run(step, weights, lambda: thalweg.torch.export_state(optimizer))


def in_jax(case: str, params: Mapping[str, Any], state: Any = None) -> Run:
    """With the parameters as a nested tree, whose paths are the names, and a wrapper around the optimizer."""
    import jax
    import optax

    import thalweg.optax

    def tree(flat: Mapping[str, Any]) -> dict[str, Any]:
        nested: dict[str, Any] = {}
        for name, x in flat.items():
            *parents, last = name.split(".")
            inner = nested
            for parent in parents:
                inner = inner.setdefault(parent, {})
            inner[last] = jax.numpy.asarray(x)
        return nested

    def flat(nested: Any) -> dict[str, Any]:
        leaves, _ = jax.tree_util.tree_flatten_with_path(nested)
        return {".".join(key.key for key in path): np.asarray(x) for path, x in leaves}

    options = dict(OPTIONS[case])
    rule = RULES[case.split()[0]]
    solver = optax.chain(optax.identity(), thalweg.optax.transformation(rule, options.pop("lr"), **options))
    run: dict[str, Any] = {"params": tree(params)}
    run["state"] = jax.jit(solver.init)(run["params"])
    if state is not None:
        run["state"] = thalweg.optax.import_state(run["state"], run["params"], state)

    @jax.jit
    def take(grads: Any, state: Any, params: Any) -> Any:
        updates, state = solver.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def step(grads: Mapping[str, Any]) -> None:
        run["params"], run["state"] = take(tree(grads), run["state"], run["params"])

    return Run(step, lambda: flat(run["params"]), lambda: thalweg.optax.export_state(run["state"], run["params"]))


FRONT_ENDS: dict[str, Any] = {"numpy": in_numpy, "torch": in_torch, "jax": in_jax}
HERE = [name for name in FRONT_ENDS if importlib.util.find_spec(name)]
PAIRS = [pytest.param(here, there, id=f"{here} to {there}") for here in HERE for there in HERE]
#: By day each writes what the next one reads.
ROUND = [pair for pair in PAIRS if pair.values[0] != pair.values[1]]
if BY_DAY:
    ROUND = [pair for pair in ROUND if pair.values == (HERE[HERE.index(pair.values[1]) - 1], pair.values[1])]


@pytest.mark.slow
@pytest.mark.parametrize(("here", "there"), ROUND)
@pytest.mark.parametrize("case", CASES)
def test_three_steps_here_and_three_there_are_six_steps(case: str, here: str, there: str) -> None:
    start, grads = drawn(0), [drawn(seed) for seed in range(1, 7)]
    straight, first = in_numpy(case, start), FRONT_ENDS[here](case, start)
    for g in grads[:3]:
        straight.step(g)
        first.step(g)
    second = FRONT_ENDS[there](case, first.weights(), first.exported())
    for g in grads[3:]:
        straight.step(g)
        second.step(g)
    for name, expected in straight.weights().items():
        went = np.abs(expected - start[name]).max()
        assert np.abs(second.weights()[name] - expected).max() <= FLOAT64 * went
    states, found = straight.exported()["state"], second.exported()["state"]
    for name, entries in states.items():
        assert set(entries) == set(found[name])
        assert int(found[name]["step"]) == 6
        for key, expected in entries.items():
            scale = 1.0 if key == "refresh" else np.abs(expected).max(initial=0)  # a share of 1, and often 0
            assert np.abs(found[name][key] - expected).max(initial=0) <= FLOAT64 * scale, (name, key)


@pytest.mark.parametrize(("here", "there"), PAIRS)
@pytest.mark.parametrize("kept", KEPT)
def test_what_goes_out_comes_back_bit_by_bit(kept: str, here: str, there: str) -> None:
    start, g = in_few_bits(kept)
    first = FRONT_ENDS[here](kept, start)
    first.step(g)
    out = first.exported()["state"]["w"]
    assert {entry.dtype.name for entry in out.values()} & {"bfloat16", "int8"}
    again = FRONT_ENDS[there](kept, first.weights(), first.exported()).exported()["state"]["w"]
    assert out.keys() == again.keys()
    assert int(out.pop("step")) == int(again.pop("step")) == 1
    for key, entry in out.items():
        assert (entry.dtype, entry.tobytes()) == (again[key].dtype, again[key].tobytes())


@pytest.mark.parametrize("there", [name for name in HERE if name != "numpy"])
@pytest.mark.parametrize("kept", ["LAMB in 8 bits", "LAMB in 8 bits, compensated"])
def test_state_that_is_kept_otherwise_is_refused(kept: str, there: str) -> None:
    """numpy converts it at the next step, as it does with states of its own."""
    start, g = in_few_bits(kept)
    for before, after in ((kept, "LAMB"), ("LAMB", kept)):
        first = in_numpy(before, start)
        first.step(g)
        with pytest.raises(StateError, match=r"'w' does not fit its options.*state_dtype and rounding too"):
            FRONT_ENDS[there](after, start, first.exported())


def changed(**entries: Any) -> Callable[[Any], Any]:
    """Other entries of "conv"."""
    return lambda good: {**good, "state": {**good["state"], "conv": {**good["state"]["conv"], **entries}}}


def without(name: str) -> Callable[[Any], Any]:
    return lambda good: {**good, "state": {key: s for key, s in good["state"].items() if key != name}}


ALL, BY_PARAMETERS = ["numpy", "torch", "jax"], ["torch", "jax"]
#: What is done to a state of LAMB, and the words of the error, told by these front ends before anything is changed.
REFUSED: dict[str, tuple[Callable[[Any], Any], str, list[str]]] = {
    "another rule": (lambda good: {**good, "optimizer": "LARS"}, "state of LARS and cannot be loaded into LAMB", ALL),
    "another version": (lambda good: {**good, "version": 7}, "state of version 7 of LAMB and cannot be", ALL),
    "several rules": (
        lambda good: {**good, "optimizer": "Mixture", "rules": {name: ["LARS", 1] for name in SHAPES}},
        "has a state of LARS, which cannot be loaded into LAMB",
        ALL,
    ),
    "rules of nobody": (lambda good: {**good, "optimizer": "Mixture"}, "this state is damaged: KeyError, 'rules'", ALL),
    "a newer layout": (lambda good: {**good, "layout": 2}, "reads up to 1: update thalweg", ALL),
    "a layout of text": (lambda good: {**good, "layout": "1"}, "layout of a saved state must be a whole number", ALL),
    "no head": (lambda good: {"state": {}}, "not an exported state, .*: it is a dict with 'state'; export_state", ALL),
    "a path": (lambda good: "state.npz", r"it is 'state.npz'; .*load\(path\) reads a file", ALL),
    "a list of states": (lambda good: {**good, "state": [1]}, "this state is damaged: AttributeError", ALL),
    "no entries": (lambda good: {**good, "state": {"conv": 3}}, "state of 'conv' must map keys to arrays, got 3", ALL),
    **{
        f"{step!r} steps": (changed(step=step), "step.* of 'conv' must be a whole number >= 0", ALL)
        for step in (-3, 2.5, "x", None, np.nan, 2**31, np.ones(3))
    },
    "text": (changed(exp_avg=np.full((3, 4, 5), "x")), "state of 'conv' must be arrays of fl|is damaged: TypeEr", ALL),
    "complex": (changed(exp_avg=np.full((3, 4, 5), 1j)), "state of 'conv' must be arrays of floating point", ALL),
    "a key without an array": (changed(exp_avg=None), "state of 'conv' must be arrays of floating|is damaged", ALL),
    "another name": (
        lambda good: {**good, "state": {**good["state"], "other": good["state"]["scale"]}},
        "'other' that is not here: here are",
        BY_PARAMETERS,
    ),
    "another shape": (changed(exp_avg=np.zeros((2, 2))), "the state of 'conv' does not fit", BY_PARAMETERS),
    "another key": (changed(more=np.zeros(2)), "the state of 'conv' does not fit", BY_PARAMETERS),
    "a number for an array": (changed(more=3), "this state is damaged|state of 'conv' does not fit", BY_PARAMETERS),
    # one count serves all parameters there
    "other steps": (changed(step=np.array(7)), r"different numbers of steps, \[1, 7\]", ["jax"]),
    "a missing parameter": (without("scale"), "no entry for parameter 'scale'", ["jax"]),
}


@pytest.mark.parametrize("front_end", HERE)
def test_what_does_not_fit_is_refused_by_name(front_end: str) -> None:
    first = in_numpy("LAMB", drawn(0))
    first.step(drawn(1))
    for change, words, front_ends in REFUSED.values():
        if front_end in front_ends:
            with pytest.raises(StateError, match=words):
                FRONT_ENDS[front_end]("LAMB", drawn(0), change(first.exported()))


def test_a_global_count_of_steps_goes_along() -> None:
    pytest.importorskip("optax")
    first = in_jax("LAMB", drawn(0))
    straight, second = (thalweg.numpy.LAMB(**CASES["LAMB"], global_step=True) for _ in range(2))
    params = {name: p.copy() for name, p in drawn(0).items()}
    for seed in range(1, 4):
        first.step(drawn(seed))
        straight.step(params, drawn(seed))
    second.load_state_dict(first.exported())
    weights = {name: p.copy() for name, p in first.weights().items()}
    straight.step(params, drawn(6))
    second.step(weights, drawn(6))
    assert all(np.abs(weights[name] - p).max() <= FLOAT64 for name, p in params.items())


def test_jax_exports_parameters_of_which_nothing_is_kept_and_refuses_what_it_does_not_know() -> None:
    pytest.importorskip("optax")
    import jax.numpy as jnp
    import optax

    from thalweg.optax import export_state, import_state, lamb, lars, sgd

    params = {"a": jnp.ones(4), "b": jnp.ones(4), "none": None}
    labels = {"a": "a", "b": "b", "none": "a"}
    solver = optax.partition({"a": lars(0.1), "b": lars(0.01, momentum=0.0)}, labels)
    _, state = solver.update(params, solver.init(params), params)
    out = export_state(state, params)
    assert {name: set(s) for name, s in out["state"].items()} == {"a": {"step", "momentum_buffer"}, "b": {"step"}}
    assert out["iteration"] == 1
    again = import_state(solver.init(params), params, out)
    assert export_state(again, params)["state"]["b"]["step"] == 1
    plain = sgd(0.1)
    kept = export_state(plain.update(params, plain.init(params), params)[1], params)
    assert kept["state"] == {"a": {"step": 1}, "b": {"step": 1}}
    assert import_state(plain.init(params), params, kept).count == 1
    with pytest.raises(StateError, match="'a' that params does not have"):
        export_state(state, {"params": params})
    for other in (lamb(0.1), lars(0.1)):
        with pytest.raises(StateError, match="two entries for parameter 'a'"):
            export_state(optax.chain(lamb(0.1), other).init(params), params)
    mixed = optax.partition({"a": lars(0.1), "b": lamb(0.1)}, labels).init(params)
    assert export_state(mixed, params)["rules"] == {"a": ["LARS", 1], "b": ["LAMB", 1]}
    with pytest.raises(StateError, match=r"must be the state of an optimizer of thalweg\.optax, and it has none"):
        export_state(optax.adam(0.1).init(params), params)
