"""Values of a traced rule: what is computed from what, and along which axes of a parameter it varies."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable
from typing import Any, TypeAlias

from thalweg.arrays import is_number
from thalweg.programs.operations import OPERATIONS, REDUCTIONS
from thalweg.rules.places import Place, place_in
from thalweg.spaces.symbols import Run, Symbol

#: The axes along which a value varies; None: a number that the host knows, the same for every tensor.
Extent: TypeAlias = frozenset[int] | None
#: What a value may be computed from: another value, or a number that stands in the rule.
Operand: TypeAlias = Any

#: Neutral elements: x * 1, x + 0 and so on are x.
NEUTRAL = {"mul": 1.0, "div": 1.0, "add": 0.0, "sub": 0.0, "pow": 1.0}
#: Powers that are a few products, which take less time and are closer than any function of powers.
PRODUCTS = range(2, 9)


class Value(Symbol):
    """One value of a graph. Equal operations on equal operands are one value."""

    __slots__ = ("args", "axes", "extent", "index", "name", "op")

    run: Graph

    def __init__(
        self, graph: Graph, op: str, args: tuple[Operand, ...], extent: Extent, name: str, axes: tuple[int, ...]
    ) -> None:
        self.run, self.op, self.args, self.extent = graph, op, args, extent
        #: Of inputs: what they are called. Of reductions: the axes that they combine.
        self.name, self.axes = name, axes
        self.index = len(graph.values)

    @property
    def graph(self) -> Graph:
        return self.run

    @property
    def values(self) -> list[Value]:
        """The operands that are values, without plain numbers."""
        return [arg for arg in self.args if isinstance(arg, Value)]

    @property
    def is_reduction(self) -> bool:
        return self.op in REDUCTIONS

    @property
    def is_mean(self) -> bool:
        """Whether a reduction is divided by how many it combines."""
        return self.is_reduction and REDUCTIONS[self.op].is_mean

    @property
    def is_squared(self) -> bool:
        """Whether a reduction is one of squares."""
        return self.is_reduction and REDUCTIONS[self.op].is_squared

    def __repr__(self) -> str:
        shown = [self.name] if self.name else []
        shown += [f"v{arg.index}" if isinstance(arg, Value) else repr(arg) for arg in self.args]
        return f"v{self.index} = {self.op}({', '.join(shown)})"


class Graph(Run):
    """All values of one traced rule, in the order in which they were computed."""

    def __init__(self, rule_name: str, files: frozenset[str], *, simplified: bool = True) -> None:
        super().__init__(rule_name, files)
        #: Whether x * 1 and the like are x. If not, graphs differ less from one another.
        self.simplified = simplified
        self.values: list[Value] = []
        self.known: dict[Any, Value] = {}
        #: What the rule calls a value.
        self.names: dict[Value, str] = {}
        self.latest: dict[Place, Value] = {}

    def input(self, name: str, extent: Extent) -> Value:
        return self.value("input", (), extent, name)

    def apply(self, op: str, *args: Operand) -> Any:
        """The value of an elementwise operation, or a number if all operands are numbers."""
        for arg in args:
            if not isinstance(arg, Value) and not is_number(arg):
                self.refuse_operand(arg)
        if not any(isinstance(arg, Value) for arg in args):
            return OPERATIONS[op].compute(*args)
        if self.simplified and op in NEUTRAL and len(args) == 2:
            if is_number(args[1]) and args[1] == NEUTRAL[op]:
                return args[0]
            if op in ("add", "mul") and is_number(args[0]) and args[0] == NEUTRAL[op]:
                return args[1]
            if op == "pow" and is_number(args[1]) and args[1] in PRODUCTS:
                half = self.apply(op, args[0], args[1] // 2)
                square = self.apply("mul", half, half)
                return self.apply("mul", square, args[0]) if args[1] % 2 else square
        return self.value(op, args, joint_extent(args))

    def value(
        self, op: str, args: tuple[Operand, ...], extent: Extent, name: str = "", axes: tuple[int, ...] = ()
    ) -> Value:
        key = op, tuple(arg.index if isinstance(arg, Value) else (type(arg), arg) for arg in args), name, axes
        if key not in self.known:
            value = Value(self, op, args, extent, name, axes)
            self.values.append(value)
            self.known[key] = value
            self.call(value, name)
        return self.known[key]

    def call(self, value: Value, name: str) -> None:
        """Give a value the name that the rule's line assigns: the last value that the line computes has it."""
        place = place_in(self.files)
        if not name and place is not None:
            assignment = re.match(r"\s*([a-z]\w*)(?::[^=]+)? = ", linecache.getline(*place))
            name = assignment.group(1) if assignment else ""
            self.names.pop(self.latest.get(place), None)  # type: ignore[arg-type]
            self.latest[place] = value
        if name:
            self.names[value] = name


def joint_extent(args: Iterable[Operand]) -> Extent:
    """The extent of what is computed element by element: along every axis along which an operand varies."""
    extents = [arg.extent for arg in args if isinstance(arg, Value)]
    known = [extent for extent in extents if extent is not None]
    return frozenset().union(*known) if known else None


def needed_by(values: Iterable[Any]) -> set[Value]:
    """These values, and all values that they are computed from."""
    needed: set[Value] = set()
    waiting = [value for value in values if isinstance(value, Value)]
    while waiting:
        value = waiting.pop()
        if value not in needed:
            needed.add(value)
            waiting += value.values
    return needed
