"""What native code does not step: who insists is told which parameter and why, and else the reference steps it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from agree import draw, draw_gradients
from raw_arrays import bits
from side_by_side import made, needs_core

import thalweg.numpy
from thalweg import Moment, Rule, Square, Squares, Update
from thalweg.errors import OptionError

pytestmark = needs_core

FACTORED: dict[str, Any] = dict(min_dim_size_to_factor=1, momentum=0.9)
BEHIND, CODED = (12, 11, 5, 5, 6), (64, 64, 3, 3)


#: (rule, shape, options, order of the parameter in memory, words).
REFUSED: list[tuple[str, tuple[int, ...], dict[str, Any], Any, str]] = [
    ("Adafactor", BEHIND, FACTORED, "C", "parameter 'w': .* has 150 elements behind axis 1"),
    ("Adafactor", CODED, dict(FACTORED, state_dtype="int8"), "C", "in pieces that cut its groups of 64"),
    ("LAMB", (40, 33), {}, "F", "parameter 'w': it, or its state, is not in C order"),
]


@pytest.mark.parametrize(("rule", "shape", "options", "order", "words"), REFUSED, ids=str)
def test_what_is_not_served(rule: str, shape: Any, options: dict[str, Any], order: Any, words: str) -> None:
    shapes = {"w": shape, "b": (7,)}
    params, (step,) = draw(shapes, "float32"), draw_gradients(shapes, "float32", 1)
    params["w"] = np.array(params["w"], order=order)
    before = bits(params)
    optimizer = made(rule, "fused", **options)
    with pytest.raises(OptionError, match=words):
        optimizer.step(params, step)
    assert (bits(params), optimizer.state) == (before, {})
    other = made(rule, "auto", **options)
    other.step(params, step)
    assert other.engine == "fused + reference"
    assert bits(params) != before


def test_a_tensor_with_gaps_is_named() -> None:
    torch = pytest.importorskip("torch")
    from thalweg.torch import LAMB

    named = [("fine", torch.nn.Parameter(torch.ones(3, 4))), ("gaps", torch.nn.Parameter(torch.ones(3, 8)[:, ::2]))]
    for _, p in named:
        p.grad = torch.ones(3, 4)
    optimizer = LAMB(named, lr=0.1, engine="fused")
    with pytest.raises(OptionError, match=r"engine='fused' cannot run .*'gaps'.*strides"):
        optimizer.step()
    assert all((p == 1).all() for _, p in named)
    assert not optimizer.state


# ---- rules of one's own


def doing(do: Any, **more: Any) -> type[Rule]:
    """A rule of which this makes the delta, or the whole update, of xp, the gradient, the state and the parameter."""

    def entries(self: Any, shape: Any) -> Any:
        return {"average": Moment()}

    def update(self: Any, xp: Any, g: Any, s: Any, p: Any, *, lr: Any, **rest: Any) -> Update:
        answer = do(xp, g, s, p)
        return answer if isinstance(answer, Update) else Update(answer * -lr, dict(s))

    return dataclass(frozen=True, kw_only=True)(type("Mine", (Rule,), {"entries": entries, "update": update, **more}))


def keeping(**entries: Any) -> Any:
    return lambda self, shape: entries


def pooled(xp: Any, g: Any, s: Any, p: Any) -> Update:
    """Divides by the mean of all rows of a tensor, whichever matrix they are of."""
    rows, columns = xp.means(Squares(g, (2,)), Squares(g, (1,)))
    (mean,) = xp.means((rows, None))
    return Update(-g / (mean + rows + columns), {"rows": rows, "columns": columns}, True, {})


def by_matrix(xp: Any, g: Any, s: Any, p: Any) -> Update:
    (size,) = xp.sums(Squares(g, (1, 2)))
    return Update(-g / (1.0 + s["size"]), {"size": size}, True, {})


TRUTHS = r"Mine: v\d+ = .* of truth values alone, .*: write xp.where\(condition, 1.0, 0.0\)"
OWN: list[tuple[Any, str]] = [
    (doing(lambda xp, g, s, p: (g > 0) + (p > 0)), TRUTHS),
    (doing(lambda xp, g, s, p: xp.sqrt(g > 0)), TRUTHS),
    (doing(lambda xp, g, s, p: xp.means((g > 0, None))[0] * g), r"= mean\(v\d+\) combines truth values"),
    (doing(lambda xp, g, s, p: xp.where(g, 1.0, 0.0)), "needs a truth value as operand 1, and has a number: write"),
    (doing(lambda xp, g, s, p: xp.where((g > 0) & g, 1.0, 0.0)), "needs a truth value as operand 2, and has a number"),
    (doing(lambda xp, g, s, p: Update(g, {"average": g > 0})), "Mine.update makes a state 'average' of truth values"),
    (doing(lambda xp, g, s, p: Update(g > 0, dict(s))), "Mine.update makes a delta of truth values: write xp.where"),
    (doing(lambda xp, g, s, p: Update(g, dict(s), xp.sums((g, None))[0])), r"must be a truth .* as xp.isfinite\(x\)"),
    (doing(lambda xp, g, s, p: xp.upper(g)), "uses xp.upper, of which no fused code can be made"),
    (doing(lambda xp, g, s, p: xp.sums((xp.sums((g, None))[0], None))[0] * g), "sums what is one number along these"),
    (doing(lambda xp, g, s, p: g / xp.amax(xp.abs(g), (1,))), r"Mine needs amax over axes \("),
    (
        doing(
            lambda xp, g, s, p: Update(-g, {key: value + g for key, value in s.items()}, True, {}),
            entries=keeping(**{f"entry_{i}": Moment() for i in range(7)}),
        ),
        "Mine needs 7 state entries, and native code has room for 6",
    ),
    (
        doing(pooled, entries=keeping(rows=Square(over=(2,)), columns=Square(over=(1,)))),
        "Mine sums rows or columns over whole tensors, of which no native code is made",
    ),
    (
        doing(by_matrix, entries=keeping(size=Square(over=(1, 2)))),
        "Mine keeps 'size', and kernels are made for state of elements, rows, columns and",
    ),
]


@pytest.mark.parametrize(("rule", "words"), OWN, ids=[words[:40] for _, words in OWN])
def test_what_no_code_can_be_made_of(rule: Any, words: str) -> None:
    weights = np.ones((2, 3, 4))
    optimizer = thalweg.numpy.optimizer(rule)(0.1, engine="fused")
    with pytest.raises(OptionError, match=rf"^engine='fused' cannot run for parameter 'w': .*{words}"):
        optimizer.step({"w": weights}, {"w": np.ones((2, 3, 4))})
    assert (weights == 1).all()
    assert optimizer.state == {}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no compiler here")
def test_truths_may_choose_and_count_among_numbers() -> None:
    rule = doing(lambda xp, g, s, p: xp.where((g > 0) & (p > 1), 3.0, 0.0) + (g > 0) * p)
    weights = np.array([1.0, 2.0, 3.0])
    optimizer = thalweg.numpy.optimizer(rule)(1.0)
    optimizer.update("w", weights, np.array([1.0, 1.0, -1.0]))
    assert weights.tolist() == [0.0, -3.0, 3.0]
    assert optimizer.engine == "fused"
