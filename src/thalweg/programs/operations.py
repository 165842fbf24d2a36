"""The operations of programs: one table says how many operands each has, and what follows from them.

Values are numbers or truths. A truth among numbers counts as 1 or 0. What is made element by element varies along every
axis along which an operand varies; a reduction no longer varies along its axes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from thalweg.arrays import ELEMENTWISE

NUMBER, TRUTH = "number", "truth value"


class Operation(NamedTuple):
    """An operation of elements."""

    #: What Python computes of numbers.
    compute: Callable[..., Any]
    operands: int = 2
    #: What its result is; None: what its operands are.
    makes: str | None = NUMBER
    #: What each operand has to be, "" if it may be either. None: one of them a number, as truths have no arithmetic.
    takes: tuple[str, ...] | None = None
    #: Whether a space has it as a function.
    is_function: bool = False


class Reduction(NamedTuple):
    """An operation that combines what lies along some axes."""

    is_squared: bool = False
    is_mean: bool = False


def choose(condition: Any, yes: Any, no: Any) -> Any:
    return yes if condition else no


def function(name: str, compute: Callable[..., Any]) -> Operation:
    operands = 2 if name in ("maximum", "minimum") else 1
    return Operation(compute, operands, TRUTH if name == "isfinite" else NUMBER, is_function=True)


#: By name, in the order in which native code counts them (native/scalars.h).
OPERATIONS: dict[str, Operation] = {
    "add": Operation(operator.add),
    "sub": Operation(operator.sub),
    "mul": Operation(operator.mul),
    "div": Operation(operator.truediv),
    "pow": Operation(operator.pow),
    "gt": Operation(operator.gt, makes=TRUTH),
    "ge": Operation(operator.ge, makes=TRUTH),
    "lt": Operation(operator.lt, makes=TRUTH),
    "le": Operation(operator.le, makes=TRUTH),
    "eq": Operation(operator.eq, makes=TRUTH),
    "ne": Operation(operator.ne, makes=TRUTH),
    "and": Operation(operator.and_, 2, TRUTH, (TRUTH, TRUTH)),
    "neg": Operation(operator.neg, 1),
    **{name: function(name, compute) for name, compute in ELEMENTWISE.items()},
    "where": Operation(choose, 3, None, (TRUTH, "", ""), is_function=True),
}
REDUCTIONS: dict[str, Reduction] = {
    "sum": Reduction(),
    "sum_squares": Reduction(is_squared=True),
    "mean": Reduction(is_mean=True),
    "mean_squares": Reduction(is_squared=True, is_mean=True),
    "amax": Reduction(),
}
