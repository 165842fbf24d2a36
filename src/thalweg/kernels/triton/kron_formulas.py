"""What Kron's kernels compute of elements, and once for each matrix: made from the rule, and not written here.

``Kron.shown``, ``Kron.clipped`` and ``Kron.taken`` are traced, and functions of Triton are made of their graphs, which
kernels take as constants. What depends neither on elements nor on products is computed when a step begins, by the host
or, as far as the host does not know it, by a kernel. It is kept among the figures of each matrix.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from thalweg.errors import RuleError
from thalweg.kernels.triton import kron_begin, kron_layout, kron_reads
from thalweg.kernels.triton.derived import home, loaded
from thalweg.kernels.triton.emit import Statements, indented
from thalweg.kernels.triton.kron_layout import ACCUMULATED, DUE, FIGURES, OWN_FIGURES, T
from thalweg.programs.evaluate import stand_in
from thalweg.programs.graph import Graph, Value, needed_by
from thalweg.programs.host import function_of, options_of
from thalweg.programs.trace import GRADIENT, PARAMETER, Tracing, symbolic
from thalweg.rules import Annealed, Kron

#: A trace has two axes: the slices of a parameter, and the elements of one slice.
SHAPE = (2, 2)
ELEMENTS, SLICES, WHOLE = frozenset((0, 1)), frozenset((0,)), frozenset[int]()

MOMENTUM, WHITENED, H_SQUARE = "momentum_buffer", "h", "h_square"
#: Inputs where functions over elements find them.
READ = {
    GRADIENT: "loaded(g_places, mask) * factor",
    PARAMETER: "loaded(p_places, mask)",
    MOMENTUM: "loaded(m_places, mask)",
    H_SQUARE: "figure(figures, H_SQUARE, matrix, count)",
}
#: Inputs that the host does not know, where the kernel at the beginning finds them.
BEGINS_WITH = {
    "t": "tl.load(places_of(places, STEP, matrix, count, mask), mask, other=0.0) + 1.0",
    "refresh": "tl.load(places_of(places, REFRESH, matrix, count, mask), mask, other=0.0)",
    "lr": "tl.load(lr).to(tl.float32)",
}
FUNCTION = """\
@triton.jit
def {name}({given}figures, matrix, count):
{body}
    return {results}
"""
TILE = "g_places, p_places, m_places, mask, factor, "
BEGIN = """\
@triton.jit(do_not_specialize=VARYING)
def begin(
    places, figures, due_flags, lr, sign, grad_scale, allowed, count, {numbers}
    SCALED: tl.constexpr, ALLOWED: tl.constexpr, BLOCK: tl.constexpr,
):
    matrix = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = matrix < count
    nothing = tl.zeros((BLOCK,), tl.float32)
    begin_matrices(figures, sign, grad_scale, allowed, matrix, count, mask, SCALED, ALLOWED, BLOCK)
{body}
"""
#: Names that emitted source has for other things.
NAMES = f"{TILE} h h_square total figures matrix count places due_flags lr sign grad_scale allowed nothing tl triton"


class Traced(NamedTuple):
    """What a rule computes around the products, as values of one graph."""

    inputs: Mapping[str, Value]
    #: What is to be preconditioned, and what factors learn from.
    x: Any
    y: Any
    due: Any
    refresh: Any
    #: The parameter and its momentum, if it has one, after the step.
    p: Any
    momentum: Any
    finite: Any
    update_rms: Any


def traced(rule: Kron, *, averages: bool, knows_t: bool, knows_lr: bool, bare: bool) -> Traced:
    """A rule's own methods, run over symbols; see ``formulas_for``."""
    graph = Graph(type(rule).__name__, inspect.getsourcefile(type(rule)) or "")
    extents = {GRADIENT: ELEMENTS, PARAMETER: ELEMENTS, MOMENTUM: ELEMENTS, WHITENED: ELEMENTS, H_SQUARE: SLICES}
    extents |= {"refresh": WHOLE, "t": None if knows_t else WHOLE, "lr": None if knows_lr else WHOLE, "lr_scale": None}
    inputs = {name: graph.input(name, extent) for name, extent in extents.items()}
    xp: Any = Tracing(graph, SHAPE)
    rule, p = symbolic(rule, graph), inputs[PARAMETER]
    s: dict[str, Any] = {key: inputs[key] for key in ((MOMENTUM, "refresh") if averages and not bare else ("refresh",))}
    x, y, due, state = rule.shown(xp, inputs[GRADIENT], s, p, inputs["t"])
    h = rule.clipped(xp, inputs[WHITENED], inputs[H_SQUARE])
    lr = inputs["lr"] * inputs["lr_scale"]
    update = rule.taken(xp, h, inputs[H_SQUARE], s, p, dict(state), due, lr)
    new, momentum = p + update.delta, update.state.get(MOMENTUM)
    if bare:
        x, y, new, momentum = inputs[MOMENTUM if averages else GRADIENT], inputs[GRADIENT], h, None
    return Traced(inputs, x, y, due, state["refresh"], new, momentum, update.finite, update.stats["update_rms"])


class OfMatrices(Statements):
    """Statements of a function that kernels call for one matrix, or for a tile of one."""

    def __init__(self, figures: dict[Value, int], known: Mapping[Value, str]) -> None:
        super().__init__()
        #: Values that the beginning of a step leaves for this, with their places behind the figures of every rule.
        self.figures = figures
        self.known.update(known)
        self.used |= {*home(), *beside(), *NAMES.replace(",", " ").split()}

    def of(self, operand: Any) -> str:
        if isinstance(operand, Value) and operand not in self.known and is_begun(operand):
            index = FIGURES + self.figures.setdefault(operand, len(self.figures))
            self.let(operand, f"figure(figures, {index}, matrix, count)")
        return super().of(operand)

    def text(self, value: Value) -> str:
        if value.op == "input":
            return READ[value.name]
        if value.is_reduction:
            raise RuleError(f"{value.graph.rule_name}: kernels know the sum of h_square over slices, not {value!r}")
        return self.operation(value, **({} if value.extent == ELEMENTS else {"sqrt": "tl.sqrt_rn({0})"}))


class OfBeginning(Statements):
    """Statements of the kernel at the beginning of a step, which works on many matrices at once."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[Value] = []
        self.used |= {*home(), *beside(), *NAMES.replace(",", " ").split()}

    def of(self, operand: Any) -> str:
        if isinstance(operand, Value) and operand.extent is None and operand not in self.known:
            self.known[operand] = f"n{len(self.numbers)}"
            self.numbers.append(operand)
        return super().of(operand)

    def text(self, value: Value) -> str:
        if value.op == "input":
            return BEGINS_WITH[value.name]
        return self.operation(value, sqrt="tl.sqrt_rn(nothing + {0})")


def is_begun(value: Value) -> bool:
    """Whether a value is known when a step begins: it waits for no element and for no product."""
    waits_for = (GRADIENT, PARAMETER, MOMENTUM, WHITENED, H_SQUARE)
    return not any(each.op == "input" and each.name in waits_for for each in needed_by([value]))


@dataclass(frozen=True, eq=False)
class Formulas:
    """A rule around its products: functions that kernels take as constants, and how a step begins."""

    #: Over a tile: what is to be preconditioned, what factors learn from, the parameter and its momentum.
    shown: Any
    learned: Any
    stepped: Any
    #: From the mean of the squares of what was preconditioned, and from their sum over slices.
    update_rms: Any
    is_fine: Any
    #: The kernel at the beginning of a step, and the numbers that it takes from options, t and lr.
    begin: Any
    numbers: Callable[[Mapping[str, float]], list[float]]
    #: Whether factors are due and what is left of their count, from that before and t.
    counted: Callable[[Mapping[str, float]], list[float]]
    #: Whether the gradient itself is preconditioned.
    shows_gradient: bool
    keeps_momentum: bool

    def given(self, rule: Kron, t: int | None, lr: Any, lr_scale: float) -> dict[str, float]:
        """The numbers of one step, by the names of the kernel's arguments."""
        found = self.numbers({**options_of(rule), "t": t, "lr": lr, "lr_scale": lr_scale})
        return {f"n{i}": number for i, number in enumerate(found)}


@functools.lru_cache(maxsize=256)
def formulas_for(
    rule: Kron, *, averages: bool, knows_t: bool = True, knows_lr: bool = True, bare: bool = False
) -> Formulas:
    """The formulas of a rule. Numbers of its options are no part of them.

    averages: whether there is a momentum. knows_t, knows_lr: whether the host does. bare: what is to be preconditioned
    comes as it is, in the place of the momentum if it ``averages``, and takes the place of the parameter when clipped.
    """
    kind = stand_in(rule)
    if isinstance(rule.precond_update_probability, Annealed):
        kind = replace(kind, precond_update_probability=rule.precond_update_probability)
    assert isinstance(kind, Kron)
    return made(kind, averages, knows_t, knows_lr, bare)


@functools.lru_cache(maxsize=256)
def made(rule: Kron, averages: bool, knows_t: bool, knows_lr: bool, bare: bool) -> Formulas:
    found = traced(rule, averages=averages, knows_t=knows_t, knows_lr=knows_lr, bare=bare)
    figures: dict[Value, int] = {}
    h, h_square = found.inputs[WHITENED], found.inputs[H_SQUARE]
    total: Any = Tracing(h.graph, SHAPE).sums((h_square, None))[0]

    def function(name: str, given: str, known: Mapping[Value, str], *values: Any) -> str:
        statements = OfMatrices(figures, known)
        results = ", ".join([statements.of(value) for value in values])
        body = "\n".join(indented(statements.lines, 4))
        return FUNCTION.format(name=name, given=given, body=body, results=results)

    functions = [
        function("shown", TILE, {}, found.x),
        function("learned", TILE, {}, found.y),
        function("stepped", f"h, {TILE}", {h: "h"}, found.p, found.p if found.momentum is None else found.momentum),
        function("update_rms", "h_square, ", {h_square: "h_square"}, found.update_rms),
        function("is_fine", "total, ", {total: "total"}, found.finite),
    ]
    if len(figures) > OWN_FIGURES:
        raise RuleError(f"{type(rule).__name__} needs {len(figures)} numbers, and kernels have room for {OWN_FIGURES}")
    begin = OfBeginning()
    own = source_of(rule, functions)
    return Formulas(
        **{name: own[name] for name in ("shown", "learned", "stepped", "update_rms", "is_fine")},
        begin=source_of(rule, [emit_begin(begin, found, figures, counts=not knows_t)])["begin"],
        numbers=function_of(begin.numbers),
        counted=function_of([found.due, found.refresh], as_arrays=True),
        shows_gradient=found.x is found.inputs[GRADIENT],
        keeps_momentum=found.momentum is not None,
    )


def emit_begin(begin: OfBeginning, found: Traced, figures: Mapping[Value, int], *, counts: bool) -> str:
    """counts: whose factors are due is not known to the host."""
    stores = {T.value: begin.of(found.inputs["t"])}
    stores[DUE.value] = "tl.load(due_flags + matrix, mask, other=0).to(tl.float32)"
    if counts:
        stores[DUE.value] = f"tl.where({begin.of(found.due)}, 1.0, 0.0)"
        stores[ACCUMULATED.value] = begin.of(found.refresh)
    stores |= {FIGURES + place: begin.of(value) for value, place in figures.items()}
    lines = [f"tl.store(figures + {i} * count + matrix, nothing + {text}, mask)" for i, text in stores.items()]
    numbers = "".join(f"n{i}, " for i in range(len(begin.numbers)))
    return BEGIN.format(numbers=numbers, body="\n".join(indented([*begin.lines, *lines], 4)))


def source_of(rule: Kron, parts: list[str]) -> dict[str, Any]:
    source = "\n\n".join([f'"""What {type(rule).__name__} computes around its products."""', *parts])
    return loaded(source, type(rule).__name__, beside())


@functools.cache
def beside() -> dict[str, Any]:
    """What emitted source may use of Kron's own kernels."""
    names = {name: value for name, value in vars(kron_layout).items() if name.isupper()}
    functions = dict(figure=kron_reads.figure, places_of=kron_begin.places_of, begin_matrices=kron_begin.begin_matrices)
    return {**names, **functions, "VARYING": kron_reads.VARYING}
