"""Kernels that are made from rules: of rules that nobody wrote kernels for, and of rules that were changed."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from lanes import once
from on_device import DEVICE, agree, copy_into, gradients, parameters, train
from own_rules import Layerwise, Remembering, Signed

import thalweg.torch
from thalweg import rules
from thalweg.arrays import Scalar, Squares
from thalweg.errors import OptionError
from thalweg.kernels.triton.loading import kernels_for
from thalweg.kernels.triton.memory import Stored
from thalweg.programs.reasons import reason_underived
from thalweg.rules import Rule, Update
from thalweg.rules.blocks import average
from thalweg.rules.entries import Entry, Moment, Spread, Square

pytestmark = pytest.mark.slow  # programs are interpreted

#: Few slices: each of a stack is a program, and programs are interpreted.
SHAPES = {"vector": (6,), "matrix": (5, 7), "cube": (3, 4, 5)}


class Mirrored(rules.LAMB):
    """LAMB that goes the other way: a mutant of one sign."""

    def update(self, xp: Any, g: Any, s: Any, p: Any, **given: Any) -> Any:
        update = super().update(xp, g, s, p, **given)
        return update._replace(delta=-update.delta)


class Trailing(rules.LAMB):
    """LAMB that keeps the mean norm of its steps, each of which its last pass alone knows."""

    def entries(self, shape: Any) -> dict[str, Entry]:
        return {**super().entries(shape), "size": Spread(tuple(range(self.stacked_axes, len(shape))))}

    def update(self, xp: Any, g: Any, s: Any, p: Any, *, t: Any, **given: Any) -> Any:
        update = super().update(xp, g, s, p, t=t, **given)
        (squares,) = xp.sums(Squares(update.delta, self.own_axes(xp.shape(p))))
        return update._replace(state={**update.state, "size": average(s["size"], xp.sqrt(squares), 1 / t)})


class Gentle(rules.Adafactor):
    """Adafactor without square roots, whose update is twice as large: a mutant of two formulas."""

    def whitened(self, xp: Any, g: Any, row_var: Any, col_var: Any, mean: Any) -> Any:
        return 2.0 * g / (1.0 + row_var * col_var / mean)


@dataclass(frozen=True, kw_only=True)
class Outer(Rule):
    """Sums of absolute gradients by row and of squares by column, over the last two axes, and a mean of new rows.

    Unlike Adafactor, it averages what it has just computed for rows, divides an element by a row, needs the sum of the
    columns of a whole tensor, and decays rows by the largest of both.
    """

    beta: Scalar = 0.9
    weight_decay: Scalar = 0.0

    def kind(self, shape: Any) -> Any:
        return len(shape)

    def entries(self, shape: Any) -> dict[str, Entry]:
        last = len(shape) - 1
        if last - self.stacked_axes < 1:
            return {"exp_avg": Moment()}
        return {"by_row": Square(over=(last,)), "by_column": Square(over=(last - 1,)), "exp_avg": Moment()}

    def update(self, xp: Any, g: Any, s: Any, p: Any, *, lr: Any, lr_scale: Any = 1.0, **rest: Any) -> Any:
        last, own = len(xp.shape(p)) - 1, self.own_axes(xp.shape(p))
        (p_squares,) = xp.sums(Squares(p, own))
        if "by_row" not in s:
            m = average(s["exp_avg"], g, 1 - self.beta)
            return Update(m * (-lr * lr_scale), {"exp_avg": m}, xp.isfinite(p_squares), {})
        rows, columns = xp.sums((xp.abs(g), (last,)), Squares(g, (last - 1,)))
        by_row = self.beta * s["by_row"] + rows
        by_column = xp.maximum(self.beta * s["by_column"], columns)
        mean, (total,) = xp.means((by_row, (last - 1,)))[0], xp.sums((by_column, own))
        u = g / (1.0 + by_row) * (mean / (1.0 + by_column)) + self.weight_decay * p / (1.0 + p_squares)
        m = average(s["exp_avg"], u, 1 - self.beta)
        state = {"by_row": by_row, "by_column": by_column, "exp_avg": m}
        return Update(m * (-lr * lr_scale), state, xp.isfinite(total), {"total": total})


def make(rule: type[Rule], named: Any, engine: str, **options: Any) -> Any:
    return thalweg.torch.optimizer(rule)(named, 0.01, engine=engine, **options)


def follow(rule: type[Rule], shapes: dict[str, Any], *, lockstep: bool = False, **options: Any) -> None:
    ours, theirs = (parameters(shapes=shapes) for _ in range(2))
    fused, reference = make(rule, ours, "fused", **options), make(rule, theirs, "reference", **options)
    for step in gradients(3, shapes=shapes):
        train(fused, ours, [step])
        train(reference, theirs, [step])
        if lockstep:
            agree(fused, ours, reference, theirs)
            copy_into(fused, ours, reference, theirs)
    assert (fused.engine, reference.engine) == ("fused", "reference")
    agree(fused, ours, reference, theirs)


@once(1)
@pytest.mark.parametrize("options", [dict(weight_decay=0.1), dict(on_nonfinite="skip"), dict(stacked_axes=1)], ids=str)
@pytest.mark.parametrize("rule", [Layerwise, Mirrored, Remembering, Trailing], ids=lambda rule: rule.__name__)
def test_kernels_follow_the_rule(rule: type[Rule], options: dict[str, Any]) -> None:
    follow(rule, SHAPES, **options)


def test_numbers_that_the_last_pass_makes_are_kept() -> None:
    follow(Trailing, {"matrix": (5, 7)})


#: What lies around rows and columns: nothing, one axis before, one behind, several.
ROWS_AND_COLUMNS = {"vector": (6,), "matrix": (5, 7), "cube": (3, 4, 5), "conv": (6, 5, 3, 2)}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [{}, dict(weight_decay=0.1, on_nonfinite="skip"), dict(state_dtype="float16"), dict(stacked_axes=1)],
    ids=str,
)
@pytest.mark.parametrize("rule", [Gentle, Outer], ids=lambda rule: rule.__name__)
def test_kernels_follow_rows_and_columns(rule: type[Rule], options: dict[str, Any]) -> None:
    shapes = {name: shape for name, shape in ROWS_AND_COLUMNS.items() if len(shape) > options.get("stacked_axes", 0)}
    given = {**options, **(dict(min_dim_size_to_factor=2) if rule is Gentle else {})}
    follow(rule, shapes, lockstep=True, **given)


def test_numbers_compile_nothing_anew() -> None:
    stored = tuple(Stored(key, 4, True) for key in ("p", "g", "exp_avg", "exp_avg_sq"))
    sources = {
        kernels_for(rules.LAMB(betas=(b, 0.99), weight_decay=d, eps=e), (2,), stored, False, False).passes[0]
        for b, d, e in ((0.9, 0.1, 1e-6), (0.8, 0.2, 1e-8))
    }
    assert len(sources) == 1
    once = kernels_for(replace(rules.LAMB(), trust=False), (2,), stored, False, False)
    assert len(once.passes) == 1, "nothing waits for a sum"


class Branching(Signed):
    def update(self, xp: Any, g: Any, s: Any, p: Any, **given: Any) -> Any:
        if s["exp_avg"] > 0:
            g = -g
        return super().update(xp, g, s, p, **given)


class Crowded(Signed):
    def entries(self, shape: Any) -> dict[str, Entry]:
        return {f"average_{i}": Moment() for i in range(7)}


class Largest(Signed):
    def update(self, xp: Any, g: Any, s: Any, p: Any, **given: Any) -> Any:
        return super().update(xp, g / xp.amax(xp.abs(g), None), s, p, **given)


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        (Branching(), "branches on a value"),
        (Crowded(), "keeps 7 entries .* room for 6"),
        (Largest(), r"needs amax over axes \(0, 1\)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_no_kernel_can_be_made_of_is_told(rule: Rule, told: str) -> None:
    assert re.search(told, reason_underived(rule, (3, 4)))


def test_an_engine_that_is_asked_for_names_the_reason() -> None:
    named = [("w", torch.nn.Parameter(torch.ones(3, 4, device=DEVICE)))]
    named[0][1].grad = torch.ones(3, 4, device=DEVICE)
    optimizer = make(Largest, named, "fused")
    with pytest.raises(OptionError, match=r"'w'.*needs amax"):
        optimizer.step()
    other = make(Largest, named, "auto")
    other.step()
    assert "fused" not in other.engine
