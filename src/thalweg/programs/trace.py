"""From a rule to a graph: its own ``update`` is run once, over values that remember what was done to them.

Options that are numbers, ``lr``, ``lr_scale`` and the step become inputs, so that changing them changes no graph. All
else (flags, names, None, the number of axes) decides what the graph looks like.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from thalweg.arrays import (
    Axes,
    Shape,
    Squares,
    Term,
    is_number,
    number_log,
    number_maximum,
    number_minimum,
    reduced_shape,
)
from thalweg.errors import RuleError
from thalweg.programs.graph import Extent, Graph, Value
from thalweg.rules import Rule, Update
from thalweg.rules.places import files_of
from thalweg.rules.rule import guarded, replaced_numbers

#: Inputs that are as large as a parameter, beside its state.
PARAMETER, GRADIENT = "p", "g"
#: Elementwise functions of a space, with what Python computes of numbers.
FUNCTIONS: dict[str, Any] = {
    "sqrt": math.sqrt,
    "exp": math.exp,
    "log": number_log,
    "expm1": math.expm1,
    "cos": math.cos,
    "abs": abs,
    "floor": math.floor,
    "isfinite": math.isfinite,
    "maximum": number_maximum,
    "minimum": number_minimum,
}


@dataclass(frozen=True)
class Program:
    """A traced rule: what it computes from a parameter, its gradient and its state."""

    rule_name: str
    graph: Graph
    #: The extents of p, g and the state entries that it reads.
    memory: Mapping[str, Extent]
    delta: Any
    state: Mapping[str, Any]
    finite: Any
    stats: Mapping[str, Any]

    @property
    def entries(self) -> list[str]:
        """The keys of the state."""
        return [key for key in self.memory if key not in (PARAMETER, GRADIENT)]

    @functools.cached_property
    def inputs(self) -> dict[str, Value]:
        return {value.name: value for value in self.graph.values if value.op == "input"}

    @property
    def results(self) -> dict[str, Any]:
        """What is written: the parameter and its state."""
        return {PARAMETER: self.delta, **self.state}


class Tracing:
    """The space of a trace."""

    def __init__(self, graph: Graph, shape: Shape) -> None:
        self.graph, self.whole = graph, shape

    def shape(self, x: Any) -> Shape:
        if not isinstance(x, Value) or x.extent is None:
            return ()
        return reduced_shape(self.whole, [axis for axis in range(len(self.whole)) if axis not in x.extent])

    def dtype(self, x: Any) -> str:
        return "float32"

    def astype(self, x: Any, dtype: str) -> Any:
        return x

    def zeros_like(self, x: Value) -> Any:
        return x * 0.0

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        if isinstance(condition, bool):
            return x if condition else y
        return self.graph.apply("where", condition, x, y)

    def sums(self, *terms: Term) -> tuple[Any, ...]:
        return tuple(self.reduced("sum_squares" if isinstance(term, Squares) else "sum", *term) for term in terms)

    def means(self, *terms: Term) -> tuple[Any, ...]:
        return tuple(self.reduced("mean_squares" if isinstance(term, Squares) else "mean", *term) for term in terms)

    def amax(self, x: Any, axes: Axes) -> Any:
        return self.reduced("amax", x, axes)

    def reduced(self, op: str, x: Any, axes: Axes) -> Any:
        ndim = len(self.whole)
        over = tuple(range(ndim)) if axes is None else tuple(sorted(axis % ndim for axis in axes))
        if not isinstance(x, Value) or x.extent is None or (over and not x.extent & set(over)):
            raise RuleError(
                f"{self.graph.place()} sums what is one number along these axes already, such as another sum"
            )
        return self.graph.value(op, (x,), x.extent - set(over), axes=over)

    def __getattr__(self, name: str) -> Any:
        if name in FUNCTIONS:
            return functools.partial(self.function, name)
        raise RuleError(
            f"{self.graph.place()} uses xp.{name}, of which no fused code can be made: it can be made of arithmetic, "
            f"where, sums, means, amax, {', '.join(FUNCTIONS)}"
        )

    def function(self, name: str, *operands: Any) -> Any:
        if all(is_number(operand) for operand in operands):
            return FUNCTIONS[name](*operands)
        return self.graph.apply(name, *operands)


def trace(
    rule: Rule, shape: Shape, state: Mapping[str, Shape], *, lr: float | None = 1.0, simplified: bool = True
) -> Program:
    """Run a rule's ``update`` over symbols, for parameters of the same kind as one of this shape.

    state: the shapes of its entries. lr: None where the rule is to choose its step size. simplified: whether what is
    multiplied by 1 and the like is left as it is.
    """
    graph = Graph(type(rule).__name__, files_of(type(rule)), simplified=simplified)
    every = frozenset(range(len(shape)))
    memory: dict[str, Extent] = {PARAMETER: every, GRADIENT: every}
    memory.update({key: extent_of(entry, shape) for key, entry in state.items()})
    inputs = {name: graph.input(name, extent) for name, extent in memory.items()}
    own = frozenset(range(rule.stacked_axes))
    try:
        xp = Tracing(graph, shape)
        update = symbolic(rule, graph).update(
            xp,
            inputs[GRADIENT],
            {key: inputs[key] for key in state},
            inputs[PARAMETER],
            t=graph.input("t", frozenset()),
            lr=None if lr is None else graph.input("lr", frozenset()),
            lr_scale=graph.input("lr_scale", frozenset()),
        )
        update = guarded(xp, rule, inputs[GRADIENT], update)
    except RuleError:
        raise
    except (TypeError, AttributeError) as error:
        raise RuleError(f"{type(rule).__name__} cannot be read by a machine: {error}") from error
    check_update(graph, update, memory, own)
    return Program(graph.rule_name, graph, memory, update.delta, update.state, update.finite, update.stats)


def example_of(rule: Rule, shape: Shape) -> Shape:
    """A shape of the same kind that tells along which axes an entry of the state varies: none has size 1."""
    if len(shape) <= rule.stacked_axes:  # every number is a tensor, of one axis as well as of none
        return (2,) * (rule.stacked_axes + 1)
    plain = tuple(max(size, 2) for size in shape)
    small = (2,) * len(plain)
    return next((each for each in (small, plain) if rule.kind(each) == rule.kind(shape)), shape)


def symbolic(rule: Rule, graph: Graph) -> Rule:
    """A rule whose options are inputs of a graph where they are numbers."""
    return replace(rule, **replaced_numbers(rule, lambda name: graph.input(name, None)))


def extent_of(entry: Shape, shape: Shape) -> Extent:
    """Along which axes an entry of the state varies: where it has size 1, it does not, unless the parameter has too."""
    return frozenset(axis for axis, size in enumerate(shape) if axis < len(entry) and (entry[axis] != 1 or size == 1))


def check_update(graph: Graph, update: Any, memory: Mapping[str, Extent], own: frozenset[int]) -> None:
    """Say what is wrong with a rule's answer."""
    name = graph.rule_name
    if not isinstance(update, Update):
        raise RuleError(f"{name}.update must answer with an Update, got a {type(update).__name__}")
    entries = {key: extent for key, extent in memory.items() if key not in (PARAMETER, GRADIENT)}
    if set(update.state) != set(entries):
        raise RuleError(f"{name}.update must answer with the state {sorted(entries)}, got {sorted(update.state)}")
    for key, value in {PARAMETER: update.delta, **update.state}.items():
        extent = value.extent if isinstance(value, Value) else None
        if not (extent or frozenset()) <= (memory[key] or frozenset()):
            what = "delta" if key == PARAMETER else f"state {key!r}"
            raise RuleError(f"{name}.update makes a {what} of more axes than the one that it was given")
    for key, value in {"finite": update.finite, **update.stats}.items():
        if isinstance(value, Value) and not (value.extent or frozenset()) <= own:
            raise RuleError(f"{name}.update: {key} must be one number for each tensor")
