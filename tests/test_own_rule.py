"""A rule of one's own: a frozen dataclass anywhere, of which every front end makes an optimizer."""

from __future__ import annotations

import abc
import copy
import inspect
import math
import pickle
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from agree import agree
from own_rules import Signed, Turned

import thalweg.numpy
from thalweg import Rule, Update
from thalweg.errors import OptionError, StateError

# ---- classes


@pytest.mark.parametrize("front_end", ["numpy", "torch"])
def test_a_class_shows_the_options_of_its_rule(front_end: str) -> None:
    module = pytest.importorskip(f"thalweg.{front_end}")
    made = module.optimizer(Signed)
    assert made is module.optimizer(Signed) is pickle.loads(pickle.dumps(made))
    assert (made.__name__, made.__doc__) == ("Signed", "The sign of an average of gradients.")
    shown = inspect.signature(made).parameters
    assert {"beta": 0.9, "signed": True, "maximize": False}.items() <= {k: p.default for k, p in shown.items()}.items()
    assert shown["signed"].annotation is bool
    assert shown["lr"].default is inspect.Parameter.empty
    assert inspect.signature(module.optimizer(Turned)).parameters["lr"].default == 0.5


def test_classes_of_ours_are_made_by_the_same_call() -> None:
    from thalweg.rules import RULES

    for name, rule in RULES.items():
        assert thalweg.numpy.optimizer(rule) is getattr(thalweg.numpy, name)


def test_a_learning_rate_is_needed_where_the_rule_has_none() -> None:
    with pytest.raises(OptionError, match="Signed needs a learning rate: give lr a number"):
        thalweg.numpy.optimizer(Signed)()
    assert thalweg.numpy.optimizer(Turned)().lr == 0.5


def test_options_are_checked_as_ours_are() -> None:
    with pytest.raises(OptionError, match="Signed has no option 'betta': did you mean 'beta'"):
        thalweg.numpy.optimizer(Signed)(0.1, betta=0.5)
    with pytest.raises(OptionError, match="signed cannot be a function of the step"):
        thalweg.numpy.optimizer(Signed)(0.1, signed=lambda t: True)


@dataclass(frozen=True, kw_only=True)
class BySize(Rule):
    """Plain descent, in steps a quarter as long for tensors of more than ten numbers."""

    share: float = 1.0

    def for_shape(self, shape: Any) -> Any:
        return replace(self, share=self.share / 4) if math.prod(shape) > 10 else self

    def update(self, xp: Any, g: Any, s: Any, p: Any, *, lr: Any, lr_scale: Any = 1.0, **rest: Any) -> Update:
        return Update(g * (-lr * lr_scale * self.share), {})


# ---- steps


@pytest.mark.parametrize("engine", ["torch lists", "torch native", "optax update"])
def test_a_rule_of_which_no_fused_code_can_be_made_steps_as_the_reference(engine: str) -> None:
    options: dict[str, Any] = dict(lr=0.1, weight_decay=0.1, signed=False)
    overrides = [("b", dict(beta=0.5, lr_scale=0.25))]
    agree(engine, Turned, {"w": (3, 4), "b": (5,)}, "float64", overrides=overrides, **options)


def test_its_state_in_jax_is_pickled_and_goes_to_another_front_end() -> None:
    optax = pytest.importorskip("thalweg.optax")
    params = {"w": np.ones((3, 4))}
    solver = optax.transformation(Signed, learning_rate=0.1)
    _, state = solver.update(params, solver.init(params), params)
    again = pickle.loads(pickle.dumps(state))
    assert type(again) is type(state)
    exported = optax.export_state(again, params)
    assert (exported["optimizer"], exported["version"]) == ("Signed", 1)
    other = thalweg.numpy.optimizer(Signed)(0.1)
    other.load_state_dict(exported)
    assert (other.state["w"]["exp_avg"] == np.asarray(state.exp_avg["w"])).all()


@pytest.mark.parametrize("front_end", ["numpy", "torch", "torch list", "optax"])
def test_options_by_size(front_end: str) -> None:
    """``for_shape`` is asked for each shape, and not for the first of those that have as many axes."""
    shapes = {"small": (2, 3), "large": (20, 3), "last": (3, 2)}
    steps = {"small": -0.5, "large": -0.125, "last": -0.5}
    if front_end == "optax":
        optax = pytest.importorskip("thalweg.optax")
        import jax.numpy as jnp

        params = {name: jnp.ones(shape) for name, shape in shapes.items()}
        solver = optax.transformation(BySize, learning_rate=0.5)
        found, _ = solver.update(params, solver.init(params), params)
    elif front_end == "numpy":
        arrays = {name: np.ones(shape) for name, shape in shapes.items()}
        thalweg.numpy.optimizer(BySize)(0.5).step(arrays, {name: np.ones(shape) for name, shape in shapes.items()})
        found = {name: array - 1 for name, array in arrays.items()}
    else:
        torch = pytest.importorskip("torch")
        of_torch = pytest.importorskip("thalweg.torch")
        tensors = {name: torch.nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}
        engine = "foreach" if front_end == "torch list" else "auto"
        optimizer = of_torch.optimizer(BySize)(tensors.items(), 0.25, engine=engine)
        for t in range(2):
            for p in tensors.values():
                p.grad = torch.ones_like(p)
            optimizer.step()
            optimizer.param_groups[0]["share"] = 1.0 + t  # numbers that change are followed for each shape, too
        found = {name: p.detach().numpy() - 1 for name, p in tensors.items()}
    for name, step in steps.items():
        assert np.allclose(found[name], step), name


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("engine", ["reference", "auto"])
def test_what_is_not_finite_is_found_in_the_gradient(bad: float, engine: str) -> None:
    optimizer = thalweg.numpy.optimizer(Signed)(0.1, on_nonfinite="skip", engine=engine)
    p, g = np.ones(3), np.array([1.0, bad, 1.0])
    optimizer.step({"p": p}, {"p": g})
    assert optimizer.skipped == {"p": 1}
    assert (p == 1).all()


# ---- copies and checkpoints


def test_copies_and_pickles_find_the_class_again() -> None:
    made = thalweg.numpy.optimizer(Signed)
    assert pickle.loads(pickle.dumps(made)) is made
    optimizer = made(0.1, beta=0.5)
    optimizer.step({"p": np.ones(2)}, {"p": np.ones(2)})
    for other in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        assert type(other) is made
        assert other.stats().keys() == optimizer.stats().keys()

    class Derived(made, abc.ABC):  # type: ignore[misc, valid-type]
        """Which may be abstract."""

    with pytest.raises((pickle.PicklingError, AttributeError), match="Derived"):  # not one that is local to a function
        pickle.dumps(Derived)


def of_version(version: int) -> type[Rule]:
    """As if the author had set it in the source."""
    kind: Any = dataclass(frozen=True, kw_only=True)(type("Signed", (Signed,), {"version": version}))
    return kind


class TestVersions:
    def test_numpy(self, tmp_path: Any) -> None:
        first, second = (thalweg.numpy.optimizer(of_version(n))(0.1) for n in (1, 2))
        p = np.ones(2)
        second.step({"p": p}, {"p": p})
        second.save(tmp_path / "state.npz")
        with pytest.raises(StateError, match="a state of version 2 of Signed and cannot be loaded into version 1"):
            first.load(tmp_path / "state.npz")
        assert first.num_parameters == 0
        again = thalweg.numpy.optimizer(of_version(2))(0.1)
        again.load(tmp_path / "state.npz")
        assert again.num_parameters == 1

    def test_states_without_one_are_of_the_first(self) -> None:
        optimizer = thalweg.numpy.LAMB(0.1, variant="paper")
        optimizer.step({"p": np.ones(2)}, {"p": np.ones(2)})
        saved = optimizer.state_dict()
        assert saved.pop("version") == 1
        thalweg.numpy.LAMB(0.1, variant="paper").load_state_dict(saved)
        with pytest.raises(StateError, match="a state of LAMB and cannot be loaded into Signed"):
            thalweg.numpy.optimizer(Signed)(0.1).load_state_dict(saved)

    def test_torch(self) -> None:
        torch = pytest.importorskip("torch")
        import thalweg.torch

        def stepped(kind: Any) -> Any:
            p = torch.nn.Parameter(torch.ones(2))
            p.grad = torch.ones(2)
            optimizer = kind([p], 0.1)
            optimizer.step()
            return optimizer

        first, second = (stepped(thalweg.torch.optimizer(of_version(n))) for n in (1, 2))
        before = first.state_dict()
        with pytest.raises(StateError, match="version 2 of Signed and cannot be loaded into version 1"):
            first.load_state_dict(second.state_dict())
        assert str(first.state_dict()) == str(before)
        saved = stepped(thalweg.torch.LAMB).state_dict()
        for group in saved["param_groups"]:  # as 0.1.0 wrote it
            del group["rule_version"]
        stepped(thalweg.torch.LAMB).load_state_dict(saved)
        with pytest.raises(StateError, match="a state of LAMB and cannot be loaded into Signed"):
            first.load_state_dict(saved)
