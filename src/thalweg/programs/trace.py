"""From a rule to a graph: its own ``update`` is run once, over values that remember what was done to them.

Options that are numbers, ``lr``, ``lr_scale`` and the step become inputs, so that changing them changes no graph. All
else (flags, names, None, the number of axes) decides what the graph looks like.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from thalweg.arrays import Axes, Shape, Squares, Term, is_number, reduced_shape
from thalweg.errors import RuleError
from thalweg.programs.graph import Extent, Graph, Value, needed_by
from thalweg.programs.operations import OPERATIONS
from thalweg.programs.verify import verify
from thalweg.rules import Rule
from thalweg.rules.places import files_of
from thalweg.rules.rule import guarded, replaced_numbers
from thalweg.settings import Numerics
from thalweg.spaces.strict import NOTHING
from thalweg.storage import coded_groups
from thalweg.trial import check_update, find_looks, kind_of

#: Inputs that are as large as a parameter, beside its state.
PARAMETER, GRADIENT = "p", "g"
#: Elementwise functions of a space.
FUNCTIONS = [name for name, operation in OPERATIONS.items() if operation.is_function]


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
    #: How many leading axes are stacked: each place along them is a tensor.
    stacked_axes: int = 0

    @property
    def entries(self) -> list[str]:
        """The keys of the state."""
        return [key for key in self.memory if key not in (PARAMETER, GRADIENT)]

    @property
    def scalars(self) -> list[str]:
        """The keys of those entries that are one number for each tensor."""
        stacked = frozenset(range(self.stacked_axes))
        return [key for key in self.entries if (self.memory[key] or frozenset()) <= stacked]

    @functools.cached_property
    def inputs(self) -> dict[str, Value]:
        return {value.name: value for value in self.graph.values if value.op == "input"}

    @property
    def results(self) -> dict[str, Any]:
        """What is written: the parameter and its state."""
        return {PARAMETER: self.delta, **self.state}

    @property
    def answers(self) -> list[Any]:
        """All that the rule's update returns."""
        return [self.delta, *self.state.values(), self.finite, *self.stats.values()]

    @functools.cached_property
    def needed(self) -> set[Value]:
        """All values that an answer is computed from."""
        return needed_by(self.answers)


class Tracing:
    """The space in which a rule is traced: its functions add values to a graph."""

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

    def cond(self, condition: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
        return self.where(condition, yes(), no())

    def sums(self, *terms: Term) -> tuple[Any, ...]:
        return tuple(self.reduce("sum_squares" if isinstance(term, Squares) else "sum", *term) for term in terms)

    def means(self, *terms: Term) -> tuple[Any, ...]:
        return tuple(self.reduce("mean_squares" if isinstance(term, Squares) else "mean", *term) for term in terms)

    def amax(self, x: Any, axes: Axes) -> Any:
        return self.reduce("amax", x, axes)

    def reduce(self, op: str, x: Any, axes: Axes) -> Any:
        ndim = len(self.whole)
        over = tuple(range(ndim)) if axes is None else tuple(sorted(axis % ndim for axis in axes))
        if not isinstance(x, Value) or x.extent is None or (over and not x.extent & set(over)):
            self.graph.refuse("sums what is one number along these axes already, such as another sum")
        return self.graph.value(op, (x,), x.extent - set(over), axes=over)

    def __getattr__(self, name: str) -> Any:
        if name in FUNCTIONS:
            return functools.partial(self.function, name)
        return self.graph.refuse(
            f"uses xp.{name}, of which no fused code can be made: it can be made of arithmetic, "
            f"sums, means, amax, {', '.join(FUNCTIONS)}"
        )

    def function(self, name: str, *operands: Any) -> Any:
        if all(is_number(operand) for operand in operands):
            return OPERATIONS[name].compute(*operands)
        return self.graph.apply(name, *operands)


def trace(
    rule: Rule, shape: Shape, state: Mapping[str, Shape], *, lr: float | None = 1.0, simplified: bool = True
) -> Program:
    """Run a rule's ``update`` over symbols, for parameters of the same kind as one of this shape.

    state: the shapes of its entries. lr: None where the rule is to choose its step size. simplified: whether what is
    multiplied by 1 and the like is left as it is.
    """
    check_update(rule, shape)
    if len(shape) <= rule.stacked_axes:
        raise RuleError(
            f"{type(rule).__name__} looks at the number of axes, and no fused code is made for tensors of none"
        )
    graph = Graph(type(rule).__name__, files_of(type(rule)), simplified=simplified)
    all_axes = frozenset(range(len(shape)))
    memory: dict[str, Extent] = {PARAMETER: all_axes, GRADIENT: all_axes}
    memory.update({key: extent_of(entry, shape) for key, entry in state.items()})
    inputs = {name: graph.input(name, extent) for name, extent in memory.items()}
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
        raise RuleError(f"{type(rule).__name__} cannot be traced: {error}") from error
    program = Program(graph.rule_name, graph, memory, *update[:4], rule.stacked_axes)
    verify(program)
    return program


def example_of(rule: Rule, shape: Shape) -> Shape:
    """A shape of the same kind that tells along which axes an entry of the state varies: none has size 1."""
    try:
        if len(shape) <= rule.stacked_axes:  # every number is a tensor, of one axis as well as of none
            return shape if find_looks(rule, shape) > NOTHING else (2,) * (rule.stacked_axes + 1)
        small, plain = (2,) * len(shape), tuple(max(size, 2) for size in shape)
        kind = kind_of(rule, shape)
        return next((example for example in (small, plain) if kind_of(rule, example) == kind), shape)
    except RuleError:  # a trace of it says why
        return shape


def list_kind(rule: Rule, numerics: Numerics, shape: Shape) -> Hashable:
    """Parameters for which this is equal may be stepped as one list: their codes are in groups alike, too."""
    return kind_of(rule, shape), coded_groups(rule, numerics, shape)


def symbolic(rule: Rule, graph: Graph) -> Rule:
    """A rule whose options are inputs of a graph where they are numbers."""
    return replace(rule, **replaced_numbers(rule, lambda name: graph.input(name, None)))


def extent_of(entry: Shape, shape: Shape) -> Extent:
    """Along which axes an entry of the state varies: where it has size 1, it does not, unless the parameter has too."""
    return frozenset(axis for axis, size in enumerate(shape) if axis < len(entry) and (entry[axis] != 1 or size == 1))
