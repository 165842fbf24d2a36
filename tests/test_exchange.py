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

SHAPES = {"layers.0.w": (20, 30), "layers.0.b": (7,), "layers.1.b": (7,), "conv": (3, 4, 5), "scale": ()}
#: (optimizer, options of numpy and torch, options of optax)
CASES = {
    "LARS": (dict(lr=1.0, weight_decay=0.1), dict(learning_rate=1.0, weight_decay=0.1, norm_mode="paper")),
    "LARS without state": (dict(lr=1.0, momentum=0.0), dict(learning_rate=1.0, momentum=0.0, norm_mode="paper")),
    "LAMB": (dict(lr=0.01, weight_decay=0.1, exempt=None), dict(learning_rate=0.01, weight_decay=0.1)),
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
        if own.keys() != SHAPES.keys():
            return own
        layers = [{"w": own["layers.0.w"], "b": own["layers.0.b"]}, {"b": own["layers.1.b"]}]
        return {"layers": layers, "conv": own["conv"], "scale": own["scale"]}

    def step(self, grads: Mapping[str, Any]) -> None:
        import optax

        updates, self.state = self.update(self.tree(grads), self.state, self.params)
        self.params = optax.apply_updates(self.params, updates)

    def weights(self) -> dict[str, Any]:
        if "layers" not in self.params:
            return {name: np.asarray(x) for name, x in self.params.items()}
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
@pytest.mark.parametrize("case", [*CASES])
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


#: Options under which state is kept in few bits, and the dtype of parameters.
KEPT = {
    "16 bits": (dict(momentum_dtype="bfloat16"), "float32"),
    "8 bits": (dict(state_dtype="int8"), "float32"),
    "8 bits, compensated": (dict(state_dtype="int8", rounding="compensated"), "float16"),
}


@by_turns()
@pytest.mark.parametrize(("here", "there"), PAIRS, ids=[f"{here} to {there}" for here, there in PAIRS])
@pytest.mark.parametrize("kept", KEPT)
def test_what_goes_out_comes_back_bit_by_bit(kept: str, here: str, there: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ml_dtypes")
    options, dtype = KEPT[kept]
    monkeypatch.setitem(CASES, "LAMB in few bits", (dict(lr=0.01, **options), dict(learning_rate=0.01, **options)))
    start, g = ({"w": np.random.default_rng(seed).standard_normal((64, 64)).astype(dtype)} for seed in (0, 1))
    first = FRONT_ENDS[here]("LAMB in few bits", start)
    first.step(g)
    out = first.exported()["state"]["w"]
    assert {entry.dtype.name for entry in out.values()} & {"bfloat16", "int8"}
    again = FRONT_ENDS[there]("LAMB in few bits", first.weights(), first.exported()).exported()["state"]["w"]
    assert out.keys() == again.keys()
    assert int(out.pop("step")) == int(again.pop("step")) == 1
    for key, entry in out.items():
        assert entry.dtype == again[key].dtype
        assert entry.tobytes() == again[key].tobytes()


def changed(good: dict[str, Any], **entries: Any) -> dict[str, Any]:
    """An exported state with other entries of "conv"."""
    return {**good, "state": {**good["state"], "conv": {**good["state"]["conv"], **entries}}}


#: What is done to a state of LAMB, and the words of the error, told at once by every front end.
REFUSED: dict[str, tuple[Any, str]] = {
    "another rule": (lambda good: {**good, "optimizer": "LARS"}, "is a state of LARS and cannot be loaded into LAMB"),
    "another version": (lambda good: {**good, "version": 7}, "a state of version 7 of LAMB and cannot be loaded"),
    "several rules": (
        lambda good: {**good, "optimizer": "Mixture", "rules": {name: ["LARS", 1] for name in SHAPES}},
        "this is a state of LARS and cannot be loaded into LAMB",
    ),
    "a newer layout": (lambda good: {**good, "layout": 2}, "reads up to 1: update thalweg"),
    "no head": (lambda good: {"state": {}}, "must have the keys"),
    "a step below 0": (lambda good: changed(good, step=-3), "the step of 'conv' must be a whole number >= 0"),
    "half a step": (lambda good: changed(good, step=2.5), "the step of 'conv' must be a whole number >= 0"),
    "a step of text": (lambda good: changed(good, step="x"), "the step of 'conv' must be a whole number >= 0"),
    "too many steps": (lambda good: changed(good, step=2**31), "the step of 'conv' must be a whole number >= 0"),
    "entries of text": (lambda good: changed(good, exp_avg=np.array("x")), "must be .*floating point"),
}
#: The same where parameters are known before they are stepped.
REFUSED_BY_PARAMETERS: dict[str, tuple[Any, str]] = {
    "another name": (
        lambda good: {**good, "state": {**good["state"], "other": good["state"]["scale"]}},
        "'other' that is not here",
    ),
    "another shape": (lambda good: changed(good, exp_avg=np.zeros((2, 2))), "the state of 'conv' does not fit"),
    "another key": (lambda good: changed(good, more=np.zeros(2)), "the state of 'conv' does not fit"),
}
#: The same in JAX, where one count serves all parameters.
REFUSED_IN_JAX: dict[str, tuple[Any, str]] = {
    "other steps": (lambda good: changed(good, step=np.array(7)), r"different numbers of steps, \[1, 7\]"),
    "a missing parameter": (
        lambda good: {**good, "state": {name: s for name, s in good["state"].items() if name != "scale"}},
        "no entry for parameter 'scale'",
    ),
}


@pytest.mark.parametrize("front_end", [name for name in FRONT_ENDS if importlib.util.find_spec(name)])
def test_what_does_not_fit_is_refused_by_name(front_end: str) -> None:
    first = InNumpy("LAMB", drawn(0))
    first.step(drawn(1))
    by_parameters, in_jax = front_end != "numpy", front_end == "jax"
    rows = {**REFUSED, **(REFUSED_BY_PARAMETERS if by_parameters else {}), **(REFUSED_IN_JAX if in_jax else {})}
    for change, words in rows.values():
        with pytest.raises(StateError, match=words):
            FRONT_ENDS[front_end]("LAMB", drawn(0), change(first.exported()))


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
