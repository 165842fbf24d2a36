"""State goes from any front end to any other without loss: ten steps here and ten there are twenty steps."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from lanes import by_turns
from tolerances import FLOAT64

import thalweg.numpy
from thalweg.errors import StateError
from thalweg.exchange import pack_state
from thalweg.rules import LAMB

SHAPES = {"layers.0.w": (20, 30), "layers.0.b": (7,), "layers.1.b": (7,), "conv": (3, 4, 5), "scale": ()}
#: (optimizer, options of numpy and torch, options of optax)
CASES = {
    "LARS": (dict(lr=1.0, weight_decay=0.1), dict(learning_rate=1.0, weight_decay=0.1, norm_mode="paper")),
    "LARS without state": (dict(lr=1.0, momentum=0.0), dict(learning_rate=1.0, momentum=0.0, norm_mode="paper")),
    "LAMB": (dict(lr=0.01, weight_decay=0.1, exempt=None), dict(learning_rate=0.01, weight_decay=0.1)),
    "LAMB in 16 bits": (
        dict(lr=0.01, momentum_dtype="bfloat16", exempt=None),
        dict(learning_rate=0.01, momentum_dtype="bfloat16"),
    ),
    "Adafactor": (
        dict(lr=0.01, min_dim_size_to_factor=4, momentum=0.9),
        dict(learning_rate=0.01, min_dim_size_to_factor=4, momentum=0.9, dtype_momentum="float64"),
    ),
    "Kron": (dict(lr=0.01, precond_update_probability=0.4), dict(learning_rate=0.01, precond_update_probability=0.4)),
}


def drawn(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {name: np.asarray(rng.standard_normal(shape)) for name, shape in SHAPES.items()}


class InNumpy:
    def __init__(self, case: str, params: Mapping[str, Any], state: Any = None) -> None:
        self.params = {name: p.copy() for name, p in params.items()}
        self.optimizer = getattr(thalweg.numpy, case.split()[0])(**CASES[case][0])
        if state is not None:
            self.optimizer.load_state_dict(state)

    def step(self, grads: Mapping[str, Any]) -> None:
        self.optimizer.step(self.params, grads)

    def weights(self) -> dict[str, Any]:
        return self.params

    def exported(self) -> dict[str, Any]:
        return self.optimizer.state_dict()


class InTorch:
    def __init__(self, case: str, params: Mapping[str, Any], state: Any = None) -> None:
        import torch

        import thalweg.torch

        self.params = {name: torch.nn.Parameter(torch.tensor(p)) for name, p in params.items()}
        self.optimizer = getattr(thalweg.torch, case.split()[0])(self.params.items(), **CASES[case][0])
        if state is not None:
            thalweg.torch.import_state(self.optimizer, state)

    def step(self, grads: Mapping[str, Any]) -> None:
        import torch

        for name, p in self.params.items():
            p.grad = torch.tensor(grads[name])
        self.optimizer.step()

    def weights(self) -> dict[str, Any]:
        return {name: p.detach().numpy() for name, p in self.params.items()}

    def exported(self) -> dict[str, Any]:
        import thalweg.torch

        return thalweg.torch.export_state(self.optimizer)


class InJax:
    """With the parameters as a nested tree, whose paths are the names, and a wrapper around the optimizer."""

    def __init__(self, case: str, params: Mapping[str, Any], state: Any = None) -> None:
        import jax
        import optax

        import thalweg.optax

        self.params = self.tree(params)
        solver = getattr(thalweg.optax, case.split()[0].lower())(**CASES[case][1])
        self.solver = optax.chain(optax.identity(), solver)
        self.state = self.solver.init(self.params)
        if state is not None:
            self.state = thalweg.optax.import_state(self.state, self.params, state)
        self.update = jax.jit(self.solver.update)

    @staticmethod
    def tree(flat: Mapping[str, Any]) -> Any:
        import jax.numpy as jnp

        own = {name: jnp.asarray(x) for name, x in flat.items()}
        layers = [{"w": own["layers.0.w"], "b": own["layers.0.b"]}, {"b": own["layers.1.b"]}]
        return {"layers": layers, "conv": own["conv"], "scale": own["scale"]}

    def step(self, grads: Mapping[str, Any]) -> None:
        import optax

        updates, self.state = self.update(self.tree(grads), self.state, self.params)
        self.params = optax.apply_updates(self.params, updates)

    def weights(self) -> dict[str, Any]:
        layers = self.params["layers"]
        named = {"layers.0.w": layers[0]["w"], "layers.0.b": layers[0]["b"], "layers.1.b": layers[1]["b"]}
        return {k: np.asarray(v) for k, v in {**named, **{n: self.params[n] for n in ("conv", "scale")}}.items()}

    def exported(self) -> dict[str, Any]:
        import thalweg.optax

        return thalweg.optax.export_state(self.state, self.params)


FRONT_ENDS = {"numpy": InNumpy, "torch": InTorch, "jax": InJax}
PAIRS = [
    (here, there)
    for here in FRONT_ENDS
    for there in FRONT_ENDS
    if all(importlib.util.find_spec(name) for name in (here, there))
]


@by_turns()
@pytest.mark.slow
@pytest.mark.parametrize(("here", "there"), PAIRS, ids=[f"{here} to {there}" for here, there in PAIRS])
@pytest.mark.parametrize("case", [case for case in CASES if "16 bits" not in case])
def test_ten_steps_here_and_ten_there_are_twenty_steps(case: str, here: str, there: str) -> None:
    start, grads = drawn(0), [drawn(seed) for seed in range(1, 21)]
    straight = InNumpy(case, start)
    first = FRONT_ENDS[here](case, start)
    for g in grads[:10]:
        straight.step(g)
        first.step(g)
    second = FRONT_ENDS[there](case, first.weights(), first.exported())
    for g in grads[10:]:
        straight.step(g)
        second.step(g)
    for name, expected in straight.weights().items():
        went = np.abs(expected - start[name]).max()
        assert np.abs(second.weights()[name] - expected).max() <= FLOAT64 * went
    states, found = straight.exported()["state"], second.exported()["state"]
    for name, entries in states.items():
        assert set(entries) == set(found[name])
        assert int(found[name]["step"]) == 20
        for key, expected in entries.items():
            scale = 1.0 if key == "refresh" else np.abs(expected).max(initial=0)  # a share of 1, and often 0
            assert np.abs(found[name][key] - expected).max(initial=0) <= FLOAT64 * scale, (name, key)


@pytest.mark.parametrize("case", ["LAMB", "LAMB in 16 bits"])
@pytest.mark.parametrize("front_end", [name for name in ("torch", "jax") if importlib.util.find_spec(name)])
def test_what_goes_out_comes_back_bit_by_bit_with_its_dtypes(front_end: str, case: str) -> None:
    pytest.importorskip("ml_dtypes")
    first = FRONT_ENDS[front_end](case, drawn(0))
    first.step(drawn(1))
    out = first.exported()
    assert (out["state"]["conv"]["exp_avg"].dtype.name == "bfloat16") == ("16 bits" in case)
    again = FRONT_ENDS[front_end](case, first.weights(), out).exported()
    for name, entries in out["state"].items():
        for key, entry in entries.items():
            assert entry.dtype == again["state"][name][key].dtype
            assert entry.tobytes() == again["state"][name][key].tobytes()


@pytest.mark.parametrize("front_end", [name for name in FRONT_ENDS if importlib.util.find_spec(name)])
def test_what_does_not_fit_is_refused_by_name(front_end: str) -> None:
    make = FRONT_ENDS[front_end]
    first = InNumpy("LAMB", drawn(0))
    first.step(drawn(1))
    good = first.exported()
    with pytest.raises(StateError, match="this is a state of LARS and cannot be loaded into LAMB"):
        make("LAMB", drawn(0), {**good, "optimizer": "LARS"})
    with pytest.raises(StateError, match="reads up to 1: update thalweg"):
        make("LAMB", drawn(0), {**good, "layout": 2})
    with pytest.raises(StateError, match="must have the keys"):
        make("LAMB", drawn(0), {"state": {}})
    if front_end == "numpy":  # which knows its parameters only when they come
        return
    with pytest.raises(StateError, match="'other' that is not here"):
        make("LAMB", drawn(0), pack_state(LAMB, {**good["state"], "other": good["state"]["scale"]}))
    wrong = {**good["state"], "conv": {**good["state"]["conv"], "exp_avg": np.zeros((2, 2))}}
    with pytest.raises(StateError, match="the state of 'conv' does not fit"):
        make("LAMB", drawn(0), pack_state(LAMB, wrong))


def test_jax_refuses_different_step_counts_and_missing_parameters() -> None:
    pytest.importorskip("jax")
    first = InNumpy("LAMB", drawn(0))
    first.step(drawn(1))
    good = first.exported()["state"]
    late = {**good, "conv": {**good["conv"], "step": np.array(7)}}
    with pytest.raises(StateError, match=r"different numbers of steps, \[1, 7\]"):
        InJax("LAMB", drawn(0), pack_state(LAMB, late))
    with pytest.raises(StateError, match="no entry for parameter 'scale'"):
        InJax("LAMB", drawn(0), pack_state(LAMB, {name: s for name, s in good.items() if name != "scale"}))


def test_a_global_count_of_steps_goes_along() -> None:
    pytest.importorskip("optax")
    first = InJax("LAMB", drawn(0))
    straight = thalweg.numpy.LAMB(lr=0.01, weight_decay=0.1, exempt=None, global_step=True)
    params = {name: p.copy() for name, p in drawn(0).items()}
    for seed in range(1, 6):
        first.step(drawn(seed))
        straight.step(params, drawn(seed))
    second, weights = thalweg.numpy.LAMB(lr=0.01, weight_decay=0.1, exempt=None, global_step=True), first.weights()
    second.load_state_dict(first.exported())
    weights = {name: p.copy() for name, p in weights.items()}
    for optimizer, own in ((straight, params), (second, weights)):
        optimizer.step(own, drawn(6))
    assert all(np.abs(weights[name] - p).max() <= FLOAT64 for name, p in params.items())


def test_jax_exports_parameters_of_which_nothing_is_kept_and_refuses_what_it_does_not_know() -> None:
    pytest.importorskip("optax")
    import jax.numpy as jnp
    import optax

    from thalweg.optax import export_state, import_state, lamb, lars

    params = {"a": jnp.ones(4), "b": jnp.ones(4), "none": None}
    parts = {"a": lars(0.1), "b": lars(0.01, momentum=0.0)}
    solver = optax.partition(parts, {"a": "a", "b": "b", "none": "a"})
    _, state = solver.update(params, solver.init(params), params)
    out = export_state(state, params)
    assert {name: set(entries) for name, entries in out["state"].items()} == {
        "a": {"step", "momentum_buffer"},
        "b": {"step"},
    }
    assert out["iteration"] == 1
    again = import_state(solver.init(params), params, out)
    assert export_state(again, params)["state"]["b"]["step"] == 1
    with pytest.raises(StateError, match="'a' that params does not have"):
        export_state(state, {"params": params})
    twice = optax.chain(lamb(0.1), lamb(0.1)).init(params)
    with pytest.raises(StateError, match="two entries for parameter 'a'"):
        export_state(twice, params)
    both = optax.chain(lamb(0.1), lars(0.1)).init(params)
    with pytest.raises(StateError, match="two entries for parameter 'a'"):
        export_state(both, params)
    mixed = optax.partition({"a": lars(0.1), "b": lamb(0.1)}, {"a": "a", "b": "b", "none": "a"}).init(params)
    assert export_state(mixed, params)["rules"] == {"a": ["LARS", 1], "b": ["LAMB", 1]}
    with pytest.raises(StateError, match=r"must be the state of an optimizer of thalweg\.optax, and it has none"):
        export_state(optax.adam(0.1).init(params), params)


@pytest.mark.parametrize("front_end", [name for name in FRONT_ENDS if importlib.util.find_spec(name)])
@pytest.mark.parametrize("step", [-3, 2.5, "x", 2**31], ids=str)
def test_steps_must_be_counts_everywhere(front_end: str, step: Any) -> None:
    first = InNumpy("LAMB", drawn(0))
    first.step(drawn(1))
    out = first.exported()
    out["state"]["conv"] = {**out["state"]["conv"], "step": step}
    with pytest.raises(StateError, match="the step of 'conv' must be a whole number >= 0"):
        FRONT_ENDS[front_end]("LAMB", drawn(0), out)
