"""Mistakes in a rule of one's own are refused before anything is stepped, with the line and with what to write."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, field, make_dataclass
from typing import Any

import numpy as np
import pytest

import thalweg.numpy
from thalweg import Moment, Rule, Square, Update, average
from thalweg.errors import RuleError


@dataclass(frozen=True, kw_only=True)
class Fine(Rule):
    beta: float = 0.9

    def entries(self, shape: Any) -> dict[str, Any]:
        return {"exp_avg": Moment()}

    def update(self, xp: Any, g: Any, s: Any, p: Any, *, lr: Any, lr_scale: Any = 1.0, **rest: Any) -> Update:
        m = average(s["exp_avg"], g, 1 - self.beta)
        return Update(m * (-lr * lr_scale), {"exp_avg": m})


def doing(body: Any, **more: Any) -> type[Rule]:
    """A rule whose update is this function."""
    kind: Any = dataclass(frozen=True, kw_only=True)(type("Mine", (Fine,), {"update": body, **more}))
    return kind


def branches(self: Any, xp: Any, g: Any, s: Any, p: Any, *, lr: Any, **rest: Any) -> Update:
    if (g > 0) is not None and xp.sums((g, None))[0] > 0:
        g = -g
    return Update(g * lr, dict(s))


def branches_on_an_option(self: Any, xp: Any, g: Any, s: Any, p: Any, *, lr: Any, **rest: Any) -> Update:
    return Update(g * lr if self.beta > 0.5 else g, dict(s))


def branches_on_the_step(self: Any, xp: Any, g: Any, s: Any, p: Any, *, t: Any, lr: Any, **rest: Any) -> Update:
    return Update(g * lr if t == 1 else g, dict(s))


def calls_numpy(self: Any, xp: Any, g: Any, s: Any, p: Any, *, lr: Any, **rest: Any) -> Update:
    return Update(np.sqrt(g * g) * lr, dict(s))


def calls_where_of_numpy(self: Any, xp: Any, g: Any, s: Any, p: Any, *, lr: Any, **rest: Any) -> Update:
    return Update(np.where(g > 0, g, 0.0), dict(s))


def calls_math(self: Any, xp: Any, g: Any, s: Any, p: Any, *, t: Any, lr: Any, **rest: Any) -> Update:
    return Update(g * math.sqrt(t), dict(s))


def calls_torch(self: Any, xp: Any, g: Any, s: Any, p: Any, *, lr: Any, **rest: Any) -> Update:
    import torch

    return Update(torch.sqrt(g), dict(s))


def calls_jax(self: Any, xp: Any, g: Any, s: Any, p: Any, *, lr: Any, **rest: Any) -> Update:
    import jax.numpy as jnp

    return Update(jnp.sqrt(g), dict(s))


def calls_a_method(self: Any, xp: Any, g: Any, s: Any, p: Any, *, lr: Any, **rest: Any) -> Update:
    return Update(g / g.sum(), dict(s))


def asks_for_a_shape(self: Any, xp: Any, g: Any, s: Any, p: Any, *, lr: Any, **rest: Any) -> Update:
    return Update(g * len(p.shape), dict(s))


def changes_in_place(self: Any, xp: Any, g: Any, s: Any, p: Any, *, lr: Any, **rest: Any) -> Update:
    g *= lr
    return Update(g, dict(s))


def changes_the_state(self: Any, xp: Any, g: Any, s: Any, p: Any, *, lr: Any, **rest: Any) -> Update:
    s["exp_avg"] = g
    return Update(g * lr, s)


def takes_a_part(self: Any, xp: Any, g: Any, s: Any, p: Any, *, lr: Any, **rest: Any) -> Update:
    return Update(g * g[0], dict(s))


def multiplies_matrices(self: Any, xp: Any, g: Any, s: Any, p: Any, *, lr: Any, **rest: Any) -> Update:
    return Update(g @ g, dict(s))


def misspells_a_key(self: Any, xp: Any, g: Any, s: Any, p: Any, *, lr: Any, **rest: Any) -> Update:
    return Update(g * s["exp_average"], dict(s))


def has_another_error(self: Any, xp: Any, g: Any, s: Any, p: Any, *, lr: Any, **rest: Any) -> Update:
    return Update(g * undefined, dict(s))  # type: ignore[name-defined]  # noqa: F821


LINES = [
    (branches, 1, "branches on a value that is known only when it runs: use xp.where, not if"),
    (branches_on_an_option, 1, "an option that decides how to compute is a bool"),
    (branches_on_the_step, 1, "branches on a value"),
    (calls_numpy, 1, "calls a function of numpy: use the functions of xp"),
    (calls_where_of_numpy, 1, "calls a function of numpy"),
    (calls_math, 1, "turns a value into a Python number.* not those of math"),
    (calls_torch, 3, "calls a function of torch: use the functions of xp"),
    (calls_jax, 3, "calls a function of jax"),
    (calls_a_method, 1, r"asks an array for \.sum.*use the functions of xp, such as xp\.sums"),
    (asks_for_a_shape, 1, r"asks an array for \.shape.*use xp\.shape\(x\)"),
    (changes_in_place, 1, r"changes a value in place.*write x = x \+ y, not x \+= y"),
    (changes_the_state, 1, "changes the state that came in: make a new dict"),
    (takes_a_part, 1, "takes a part of a value"),
    (multiplies_matrices, 1, "uses @: use xp.matmul"),
    (misspells_a_key, 1, "KeyError: 'exp_average'; the state has exp_avg"),
    (has_another_error, 1, "NameError"),
]


@pytest.mark.parametrize(("body", "line", "message"), LINES, ids=lambda value: getattr(value, "__name__", ""))
def test_the_line_is_named(body: Any, line: int, message: str) -> None:
    for package in ("torch", "jax"):
        if body.__name__ == f"calls_{package}":
            pytest.importorskip(package)
    p, g = np.ones((2, 2)), np.ones((2, 2))
    optimizer = thalweg.numpy.optimizer(doing(body))(0.1)
    with pytest.raises(RuleError, match=message) as caught:
        optimizer.step({"p": p}, {"p": g})
    first = inspect.getsourcelines(body)[1]
    assert f"Mine, line {first + line} of {__file__}: " in str(caught.value)
    assert (p == 1).all()
    assert (g == 1).all()
    assert optimizer.num_parameters == 0


@pytest.mark.parametrize("engine", ["reference", "foreach", "fused"])
def test_torch_says_so_too(engine: str) -> None:
    torch = pytest.importorskip("torch")
    import thalweg.torch

    p = torch.nn.Parameter(torch.ones(2, 2))
    p.grad = torch.ones(2, 2)
    optimizer = thalweg.torch.optimizer(doing(changes_in_place))([p], 0.1, engine=engine)
    with pytest.raises(RuleError, match="changes a value in place"):
        optimizer.step()
    assert not optimizer.state
    assert (p.grad == 1).all()


def test_jax_says_so_too() -> None:
    optax = pytest.importorskip("thalweg.optax")
    jnp = pytest.importorskip("jax.numpy")
    with pytest.raises(RuleError, match="calls a function of numpy"):
        optax.transformation(doing(calls_numpy), learning_rate=0.1).init(jnp.ones(3))


def returning(answer: Any) -> Any:
    def update(self: Any, xp: Any, g: Any, s: Any, p: Any, *, lr: Any, **rest: Any) -> Any:
        return answer(xp, g, s)

    return update


def summed(xp: Any, x: Any) -> Any:
    return xp.sums((x, (0,)))[0]


ANSWERS = [
    (lambda xp, g, s: (g, dict(s)), r"must return a thalweg.Update\(delta, state\), got a tuple"),
    (lambda xp, g, s: Update(g, {}), r"must return the state that entries\(\) declares, \['exp_avg'\], got \[\]"),
    (lambda xp, g, s: Update(g, {**s, "more": g}), r"got \['exp_avg', 'more'\].*declare a new one in entries"),
    (lambda xp, g, s: Update(g, {"exp_avg": summed(xp, g)}), r"state 'exp_avg' of shape \(1, 2\).*state keeps its"),
    (lambda xp, g, s: Update(g, {"exp_avg": 0.0}), r"state 'exp_avg' of shape \(\)"),
    (lambda xp, g, s: Update(None, dict(s)), "returns a delta of shape None for a parameter of"),
    (lambda xp, g, s: Update(g, dict(s), xp.isfinite(g)), "finite must be one number for each tensor"),
    (lambda xp, g, s: Update(g, dict(s), None, {"rms": g}), "rms must be one number for each tensor"),
]


@pytest.mark.parametrize(("answer", "message"), ANSWERS, ids=[message[:40] for _, message in ANSWERS])
def test_what_update_returns_is_looked_at(answer: Any, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        thalweg.numpy.optimizer(doing(returning(answer)))(0.1).step({"p": np.ones((2, 2))}, {"p": np.ones((2, 2))})


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"step": Moment()}, "Mine keeps 'step', a key that stands for something else: choose one that is not among"),
        ({"p": Moment()}, "keeps 'p', a key that stands"),
        ({"count": Moment()}, "keeps 'count', a key that stands"),
        ({"exp avg": Square()}, "keeps 'exp avg': a key must be a name"),
        ({"exp_avg": Moment}, "entries must return a dict of entries, such as"),
        (["exp_avg"], "entries must return a dict of entries"),
    ],
    ids=str,
)
def test_keys_of_state(entries: Any, message: str) -> None:
    kind = doing(returning(lambda xp, g, s: Update(g, dict(s))), entries=lambda self, shape: entries)
    with pytest.raises(RuleError, match=message):
        thalweg.numpy.optimizer(kind)(0.1).step({"p": np.ones(2)}, {"p": np.ones(2)})


class Undecorated(Fine):
    more: float = 0.5


@dataclass(frozen=True, kw_only=True)
class Unfinished(Rule):
    beta: float = 0.9


UNMADE = [
    (
        Undecorated,
        r"Undecorated is no dataclass, and does not know its option 'more': write @dataclass\(frozen=True",
    ),
    (Unfinished, "Unfinished has no update: a rule has to define it"),
    (
        make_dataclass("Mine", [("rate", float)], bases=(Fine,), frozen=True, kw_only=True),
        "option 'rate' of Mine has no default: give it one, a number",
    ),
    (
        make_dataclass(
            "Mine", [("sizes", list, field(default_factory=list))], bases=(Fine,), frozen=True, kw_only=True
        ),
        "option 'sizes' of Mine has no default",
    ),
    (
        make_dataclass("Mine", [("maximize", bool, field(default=False))], bases=(Fine,), frozen=True, kw_only=True),
        "option 'maximize' of Mine is one that every optimizer has: give it another name",
    ),
    (
        make_dataclass("Mine", [("version", float, field(default=0.5))], bases=(Fine,), frozen=True, kw_only=True),
        "option 'version' of Mine hides what every rule has",
    ),
    (doing(Fine.update, version=0), "version of Mine must be a whole number from 1 on, got 0"),
    (Fine(), r"a rule is a class derived from thalweg.Rule, got Fine\("),
    (dict, "a rule is a class derived from thalweg.Rule"),
]


@pytest.mark.parametrize(("rule", "message"), UNMADE, ids=[message[:40] for _, message in UNMADE])
def test_what_a_class_lacks_to_be_a_rule(rule: Any, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        thalweg.numpy.optimizer(rule)


def test_a_dataclass_that_is_not_frozen_is_refused_by_python() -> None:
    with pytest.raises(TypeError, match="cannot inherit non-frozen dataclass from a frozen one"):
        dataclass(kw_only=True)(type("Mine", (Fine,), {}))


@pytest.mark.slow
def test_what_is_fine_is_let_through_once_for_each_structure() -> None:
    p = np.ones((2, 3))
    optimizer = thalweg.numpy.optimizer(Fine)(lambda t: 0.1 / t, beta=lambda t: 0.9 - 0.1 / t)
    for _ in range(3):
        optimizer.step({"p": p}, {"p": np.ones((2, 3))})
    assert (p < 1).all()
