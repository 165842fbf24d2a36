"""The operations of programs: one table says how many operands each has, what follows from them, and how it is written.

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

    #: How Python writes it, with numpy as ``np``.
    text: str
    #: What Python computes of numbers.
    compute: Callable[..., Any]
    operands: int
    #: What its result is; None: what its operands are.
    makes: str | None = NUMBER
    #: What each operand has to be, "" if it may be either. None: one of them a number, as truths have no arithmetic.
    takes: tuple[str, ...] | None = None
    #: Whether a space has it as a function.
    is_function: bool = False


class Reduction(NamedTuple):
    """An operation that combines what lies along some axes."""

    #: How Python writes it: of a value, and of what says along which axes.
    text: str
    is_squared: bool = False
    is_mean: bool = False


def choose(condition: Any, yes: Any, no: Any) -> Any:
    return yes if condition else no


def arithmetic(text: str, compute: Callable[..., Any], operands: int = 2) -> Operation:
    return Operation(text, compute, operands)


def comparison(text: str, compute: Callable[..., Any]) -> Operation:
    return Operation(text, compute, 2, TRUTH)


def function(name: str, compute: Callable[..., Any]) -> Operation:
    operands = 2 if name in ("maximum", "minimum") else 1
    text = f"np.{name}({', '.join(f'{{{i}}}' for i in range(operands))})"
    return Operation(text, compute, operands, TRUTH if name == "isfinite" else NUMBER, is_function=True)


#: By name, in the order in which native code counts them (native/scalars.h).
OPERATIONS: dict[str, Operation] = {
    "add": arithmetic("{0} + {1}", operator.add),
    "sub": arithmetic("{0} - {1}", operator.sub),
    "mul": arithmetic("{0} * {1}", operator.mul),
    "div": arithmetic("{0} / {1}", operator.truediv),
    "pow": arithmetic("{0} ** {1}", operator.pow),
    "gt": comparison("{0} > {1}", operator.gt),
    "ge": comparison("{0} >= {1}", operator.ge),
    "lt": comparison("{0} < {1}", operator.lt),
    "le": comparison("{0} <= {1}", operator.le),
    "eq": comparison("{0} == {1}", operator.eq),
    "ne": comparison("{0} != {1}", operator.ne),
    "and": Operation("{0} & {1}", operator.and_, 2, TRUTH, (TRUTH, TRUTH)),
    "neg": arithmetic("-{0}", operator.neg, 1),
    **{name: function(name, compute) for name, compute in ELEMENTWISE.items()},
    "where": Operation("np.where({0}, {1}, {2})", choose, 3, None, (TRUTH, "", ""), is_function=True),
}
REDUCTIONS: dict[str, Reduction] = {
    "sum": Reduction("np.sum({0}{1})"),
    "sum_squares": Reduction("np.sum(np.square({0}){1})", is_squared=True),
    "mean": Reduction("np.mean({0}{1})", is_mean=True),
    "mean_squares": Reduction("np.mean(np.square({0}){1})", is_squared=True, is_mean=True),
    "amax": Reduction("np.max({0}{1})"),
}
