"""Mistakes in a rule of one's own are refused before anything is stepped, with the line and with what to write."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, make_dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

import thalweg.numpy
from thalweg import Moment, Rule, Square, Squares, Update, average
from thalweg.errors import RuleError
from thalweg.rules import Direction, Kron, Preparation, WholeRule
from thalweg.rules.whole import FORMER_NAMES


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
    return made(Fine, {"update": body, **more})


def made(base: type[Rule], body: dict[str, Any]) -> Any:
    return dataclass(frozen=True, kw_only=True)(type("Mine", (base,), body))


def moving(delta: Any) -> Any:
    """An update whose delta is this function of the rule, xp, the gradient, the state, the parameter and the step."""

    def update(self: Any, xp: Any, g: Any, s: Any, p: Any, *, t: Any, lr: Any, **rest: Any) -> Update:
        return Update(delta(self, xp, g, s, p, t), dict(s))

    return update


def branches(self: Any, xp: Any, g: Any, s: Any, p: Any, t: Any) -> Any:
    if (g > 0) is not None and xp.sums((g, None))[0] > 0:
        g = -g
    return g


def changes_in_place(self: Any, xp: Any, g: Any, s: Any, p: Any, t: Any) -> Any:
    g *= 2
    return g


def changes_the_state(self: Any, xp: Any, g: Any, s: Any, p: Any, t: Any) -> Any:
    s["exp_avg"] = g
    return g


#: Faulty functions, how many lines below their first the fault is, and what is said.
LINES: list[tuple[Any, int, str]] = [
    (branches, 1, "branches on a value that is known only when it runs: use xp.where, not if"),
    (changes_in_place, 1, r"changes a value in place.*write x = x \+ y, not x \+= y"),
    (changes_the_state, 1, "changes the state that came in: make a new dict"),
    (lambda self, xp, g, s, p, t: g if self.beta > 0.5 else -g, 0, "an option that decides how to compute is a bool"),
    (lambda self, xp, g, s, p, t: g if t == 1 else -g, 0, "branches on a value"),
    (lambda self, xp, g, s, p, t: np.sqrt(g * g), 0, "calls a function of numpy: use the functions of xp"),
    (lambda self, xp, g, s, p, t: np.where(g > 0, g, 0.0), 0, "calls a function of numpy"),
    (lambda self, xp, g, s, p, t: g * math.sqrt(t), 0, "turns a value into a Python number.* not those of math"),
    (lambda self, xp, g, s, p, t: g / g.sum(), 0, r"asks an array for \.sum.*the functions of xp, such as xp\.sums"),
    (lambda self, xp, g, s, p, t: g * len(p.shape), 0, r"asks an array for \.shape.*use xp\.shape\(x\)"),
    (lambda self, xp, g, s, p, t: g * g[0], 0, "takes a part of a value"),
    (lambda self, xp, g, s, p, t: g @ g, 0, "uses @: use xp.matmul"),
    (lambda self, xp, g, s, p, t: g * s["exp_average"], 0, "KeyError: 'exp_average'; the state has exp_avg"),
    (lambda self, xp, g, s, p, t: g * None, 0, "computes with a NoneType: use arrays, options and numbers"),
    (lambda self, xp, g, s, p, t: xp.astype(g, "float23"), 0, "asks for the dtype 'float23': use one of float32"),
    (lambda self, xp, g, s, p, t: g + xp.reshape(g, (4,)), 0, r"shapes \(2, 2\) and \(4,\), which do not go together"),
    (lambda self, xp, g, s, p, t: g * xp.sums(g)[0], 0, r"reduces something without axes: write pairs"),
    (lambda self, xp, g, s, p, t: g * undefined, 0, "NameError"),  # type: ignore[name-defined]  # noqa: F821
]


@pytest.mark.parametrize(("delta", "line", "message"), LINES, ids=[message[:40] for *_, message in LINES])
def test_the_line_is_named(delta: Any, line: int, message: str) -> None:
    p, g = np.ones((2, 2)), np.ones((2, 2))
    optimizer = thalweg.numpy.optimizer(doing(moving(delta)))(0.1)
    with pytest.raises(RuleError, match=message) as caught:
        optimizer.step({"p": p}, {"p": g})
    assert f"Mine, line {delta.__code__.co_firstlineno + line} of {__file__}: " in str(caught.value)
    assert (p == 1).all()
    assert (g == 1).all()
    assert optimizer.num_parameters == 0


def test_torch_says_so_too() -> None:
    torch = pytest.importorskip("torch")
    made = pytest.importorskip("thalweg.torch").optimizer(doing(moving(changes_in_place)))
    p = torch.nn.Parameter(torch.ones(2, 2))
    p.grad = torch.ones(2, 2)
    for engine in ("reference", "foreach", "fused"):
        optimizer = made([p], 0.1, engine=engine)
        with pytest.raises(RuleError, match="changes a value in place"):
            optimizer.step()
        assert not optimizer.state
        assert (p.grad == 1).all()


@pytest.mark.parametrize(("library", "module"), [("torch", "torch"), ("jax", "jax.numpy")])
def test_functions_of_a_framework_are_named(library: str, module: str) -> None:
    root = pytest.importorskip(module).sqrt
    kind = doing(moving(lambda self, xp, g, s, p, t: root(g)))
    with pytest.raises(RuleError, match=f"calls a function of {library}: use the functions of xp"):
        thalweg.numpy.optimizer(kind)(0.1).step({"p": np.ones(2)}, {"p": np.ones(2)})
    if library == "jax":
        with pytest.raises(RuleError, match="calls a function of jax"):
            pytest.importorskip("thalweg.optax").transformation(kind, learning_rate=0.1).init(np.ones(3))


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


@dataclass(frozen=True, kw_only=True)
class Whole(WholeRule):
    """A rule that needs whole tensors."""

    FIGURES: ClassVar[tuple[str, ...]] = ("norm",)

    def entries(self, shape: Any) -> dict[str, Any]:
        return {"exp_avg": Moment()}

    def prepare(self, xp: Any, g: Any, s: Any, p: Any, t: Any) -> Preparation:
        m = average(s["exp_avg"], g, 0.5)
        return Preparation((m,), {"exp_avg": m})

    def transform(self, xp: Any, tensors: Any, s: Any, *, due: Any = True, noise: Any = None) -> Direction:
        (m,) = tensors
        gram = xp.matmul(m, xp.swapaxes(m, -1, -2))
        return Direction(xp.matmul(xp.eigenvectors(gram), m), {"norm": xp.sums(Squares(m, None))[0]}, {})

    def apply(self, xp: Any, direction: Any, s: Any, p: Any, state: Any, *, due: Any, lr: Any) -> Update:
        return Update(direction.tensor * -lr, state, xp.isfinite(direction.figures["norm"]))


#: A method of such a rule, and what is said: of a line ("Mine, line"), or of the method as a whole.
PARTS: list[tuple[str, Any, str]] = [
    ("prepare", lambda self, xp, g, s, p, t: Preparation((np.sign(g),), dict(s)), "Mine, line.* a function of numpy"),
    ("prepare", lambda self, xp, g, s, p, t: (g, dict(s)), r"Mine.prepare .* return a thalweg.rules.Preparation\("),
    ("prepare", lambda self, xp, g, s, p, t: Preparation(xp.sums((g, (0,))), dict(s)), r"Mine.prepare .* \(1, 3\) for"),
    ("transform", lambda self, xp, x, s, **_: Direction(np.linalg.qr(*x)[0], {}, {}), "Mine, line.* of numpy"),
    ("transform", lambda self, xp, x, s, **_: Direction(xp.matmul(*x, *x), {}, {}), "Mine, line.* multiplies matrices"),
    ("transform", lambda self, xp, x, s, **_: Direction(xp.swapaxes(*x, 0, 1), {"norm": 1.0}, {}), r" \(3, 2\) for a"),
    ("transform", lambda self, xp, x, s, **_: x, r"Mine.transform .* must return a thalweg.rules.Direction\(tensor,"),
    ("transform", lambda self, xp, x, s, **_: Direction(*x, {}, {}), r"figures \[\], and FIGURES declares \['norm'\]"),
    ("apply", lambda self, xp, x, s, p, state, **_: Update(p if p > 0 else -p, state), "Mine, line.* branches on a"),
    ("apply", lambda self, xp, x, s, p, state, **_: Update(xp.swapaxes(p, 0, 1), state), r"delta of shape \(3, 2\)"),
    ("apply", lambda self, xp, x, s, p, state, **_: Update(p, {}), r"Mine.apply .* \['exp_avg'\], got \[\]"),
]


@pytest.mark.parametrize("more", [{}, {"averaged": 0.9}], ids=["alone", "averaged"])
@pytest.mark.parametrize(("part", "method", "message"), PARTS)
def test_each_part_of_a_rule_that_needs_whole_tensors(part: str, method: Any, message: str, more: Any) -> None:
    params = {"p": np.ones((2, 3))}
    with pytest.raises(RuleError, match=message) as caught:
        thalweg.numpy.optimizer(made(Whole, {part: method}))(0.1, **more).step(params, {"p": np.ones((2, 3))})
    assert f"line {method.__code__.co_firstlineno} of {__file__}" in str(caught.value)
    assert (params["p"] == 1).all()


def test_one_that_is_right_is_stepped() -> None:
    params = {"p": np.ones((2, 3))}
    thalweg.numpy.optimizer(Whole)(0.1, averaged=0.9).step(params, {"p": np.ones((2, 3))})
    assert (params["p"] != 1).any()


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


def with_field(name: str, kind: type, *default: Any) -> type:
    return make_dataclass("Mine", [(name, kind, *default)], bases=(Fine,), frozen=True, kw_only=True)


UNMADE = [
    (Undecorated, r"Undecorated is no dataclass, and does not know its option 'more': write @dataclass\(frozen=True"),
    (Unfinished, "Unfinished has no update: a rule has to define it"),
    (with_field("rate", float), "option 'rate' of Mine has no default: give it one, a number"),
    (with_field("sizes", list, field(default_factory=list)), "option 'sizes' of Mine has no default"),
    (
        with_field("maximize", bool, field(default=False)),
        "option 'maximize' of Mine is one that every optimizer has: give it another name",
    ),
    (with_field("version", float, field(default=0.5)), "option 'version' of Mine hides what every rule has"),
    (doing(Fine.update, version=0), "version of Mine must be a whole number from 1 on, got 0"),
    (Fine(), r"a rule is a class derived from thalweg.Rule, got Fine\("),
    (dict, "a rule is a class derived from thalweg.Rule"),
]


@pytest.mark.parametrize(("rule", "message"), UNMADE, ids=[message[:40] for _, message in UNMADE])
def test_what_a_class_lacks_to_be_a_rule(rule: Any, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        thalweg.numpy.optimizer(rule)


@pytest.mark.parametrize(("former", "now"), FORMER_NAMES.items())
def test_methods_with_the_names_of_earlier_versions_are_refused_and_options_may_have_them(
    former: str, now: str
) -> None:
    for base in (Whole, Kron):
        with pytest.raises(RuleError, match=f"Mine defines {former}, which is called {now} since 0.3: rename it"):
            thalweg.numpy.optimizer(made(base, {former: lambda self, *given, **named: None}))
    option = {former: True, "__annotations__": {former: "bool"}}
    helper = {former: lambda self: None, now: getattr(Whole, now)}
    for body in (option, helper):
        params = {"p": np.ones((2, 3))}
        thalweg.numpy.optimizer(made(Whole, body))(0.1).step(params, {"p": np.ones((2, 3))})
        assert (params["p"] != 1).any()
