"""What Kron's kernels compute of elements, and once for each matrix: made from the rule, and not written here.

``Kron.shown``, ``Kron.clipped``, ``Kron.taken`` and what a refresh computes beside its products are traced, and
functions of Triton are made of their graphs, which kernels take as constants. What depends on nothing that kernels
compute is known when a step begins, to the host or, as far as the host does not know it, to a kernel. It is kept among
the figures of each matrix.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, cast

from thalweg.errors import RuleError
from thalweg.kernels.text import indented
from thalweg.kernels.triton import kron_begin, kron_layout, kron_reads
from thalweg.kernels.triton.kron_layout import ACCUMULATED, DUE, FIGURES, OWN_FIGURES, T
from thalweg.kernels.triton.lines import Statements
from thalweg.kernels.triton.loading import home, loaded
from thalweg.programs.graph import Extent, Graph, Value, needed_by
from thalweg.programs.host import function_of, options_of
from thalweg.programs.trace import GRADIENT, PARAMETER, Tracing, symbolic
from thalweg.rules import Direction, Kron, factors, refresh
from thalweg.rules.places import files_of
from thalweg.rules.rule import stand_in

#: A trace has two axes: the slices of a parameter, and the elements of one slice.
SHAPE = (2, 2)
ELEMENTS, SLICES, WHOLE = frozenset((0, 1)), frozenset((0,)), frozenset[int]()

MOMENTUM, WHITENED, H_SQUARE = "momentum_buffer", "h", "h_square"
#: Inputs that are as large as what a kernel works on, and those of which there is one for each matrix.
LARGE = GRADIENT, PARAMETER, MOMENTUM, WHITENED, "q", "left"
SINGLE = H_SQUARE, "magnitude", "fourth", "largest", "norm", "size", "right", "rate", "slope", "curvature"
#: Inputs where functions find them that are not given them.
READ = {
    GRADIENT: "loaded(g_places, mask) * factor",
    PARAMETER: "loaded(p_places, mask)",
    MOMENTUM: "momentum(m_places, s_places, mask, groups, GROUP)",
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
def {name}({given}, figures, matrix, count):
{body}
    return {results}
"""
#: What functions over a tile of a parameter are given.
TILE = ("g_places", "p_places", "m_places", "s_places", "mask", "groups", "factor", "GROUP")
BEGIN = """\
@triton.jit(do_not_specialize=["count"])
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
#: Rules whose options are kept by name.
MOST_KNOWN = 64
#: Names that emitted source has for other things.
OWN_NAMES = "figures matrix count places due_flags lr sign grad_scale allowed nothing tl triton"
NAMES = {*TILE, *OWN_NAMES.split()}


class Function(NamedTuple):
    """A function to be made: what it is given, by name, and what it computes."""

    given: tuple[str, ...]
    results: tuple[Any, ...]


class Traced(NamedTuple):
    """What a rule computes beside products, as values of one graph."""

    inputs: Mapping[str, Value]
    functions: Mapping[str, Function]
    due: Any
    refresh: Any


def traced(rule: Kron, count: int, *, averages: bool, knows_t: bool, knows_lr: bool, bare: bool) -> Traced:
    """A rule's own methods, run over symbols; see ``formulas_for``."""
    graph = Graph(type(rule).__name__, files_of(type(rule)))
    extents: dict[str, Extent] = {**dict.fromkeys(LARGE, ELEMENTS), **dict.fromkeys(SINGLE, SLICES), "refresh": WHOLE}
    extents |= {"t": None if knows_t else WHOLE, "lr": None if knows_lr else WHOLE, "lr_scale": None}
    inputs = {name: graph.input(name, extent) for name, extent in extents.items()}
    xp: Any = Tracing(graph, SHAPE)
    rule, p = cast(Kron, symbolic(rule, graph)), inputs[PARAMETER]
    s: dict[str, Any] = {key: inputs[key] for key in ((MOMENTUM, "refresh") if averages and not bare else ("refresh",))}
    (x, *others), state, due = rule.prepare(xp, inputs[GRADIENT], s, p, inputs["t"])
    y = others[-1] if others else x
    h = rule.clipped(xp, inputs[WHITENED], inputs[H_SQUARE])
    lr = inputs["lr"] * inputs["lr_scale"]
    made_of_it = Direction(h, {"square": inputs[H_SQUARE]}, {})
    update = rule.apply(xp, made_of_it, s, p, dict(state), due=due, lr=lr)
    new = p + update.delta, update.state.get(MOMENTUM)
    if bare:
        x, y, new = inputs[MOMENTUM if averages else GRADIENT], inputs[GRADIENT], (h, None)
    functions = {
        "shown": Function(TILE, (x,)),
        "learned": Function(TILE, (y,)),
        "stepped": Function((WHITENED, *TILE), new),
        "update_rms": Function((H_SQUARE,), (update.stats["update_rms"],)),
        "is_fine": Function(("total",), (update.finite,)),
    }

    def of_refresh(name: str, compute: Callable[..., Any], *given: str) -> None:
        results = compute(*(inputs[each] for each in given))
        functions[name] = Function(given, results if isinstance(results, tuple) else (results,))

    of_refresh("strength", functools.partial(refresh.strength_of, rule), "magnitude")
    of_refresh("start", functools.partial(refresh.first_scale, xp, rule, count), "fourth", "largest", "norm")
    of_refresh("paced", functools.partial(refresh.paced, xp, rule), "norm", "size")
    of_refresh("moved", functools.partial(refresh.moved, rule), "q", "left", "right", "rate")
    of_refresh("angle", functools.partial(factors.angle, xp), "slope", "curvature")
    return Traced(inputs, functions, due, state["refresh"])


class OfMatrices(Statements):
    """Statements of a function that kernels call for one matrix, or for a tile of one."""

    def __init__(self, figures: dict[Value, int], known: Mapping[Value, str]) -> None:
        super().__init__()
        #: Values that the beginning of a step leaves for this, with their places behind the figures of every rule.
        self.figures = figures
        self.known.update(known)
        self.used |= {*home(), *beside(), *NAMES, *known.values()}

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
        self.used |= {*home(), *beside(), *NAMES}

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
    """Whether a value is known when a step begins: it waits for nothing that kernels read or compute."""
    return not any(each.op == "input" and each.name in (*LARGE, *SINGLE) for each in needed_by([value]))


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
    #: Of a refresh: the strength of noise, what first factors are scaled by, norm and pace of a step, a diagonal factor
    #: after it, and how far a dense one is rotated.
    strength: Any
    start: Any
    paced: Any
    moved: Any
    angle: Any
    #: The kernel at the beginning of a step, and the numbers that it takes from options, t and lr.
    begin: Any
    numbers: Callable[[Mapping[str, float]], list[float]]
    #: Whether the gradient itself is preconditioned.
    shows_gradient: bool
    keeps_momentum: bool

    def constants(self) -> dict[str, Any]:
        """The functions by the names that kernels have for them."""
        return dict(
            LEARNED=self.learned,
            STEPPED=self.stepped,
            UPDATE_RMS_OF=self.update_rms,
            IS_FINE=self.is_fine,
            STRENGTH_OF=self.strength,
            START_OF=self.start,
            PACED=self.paced,
            MOVED=self.moved,
            ANGLE_OF=self.angle,
            KEEPS_MOMENTUM=self.keeps_momentum,
        )


class Options:
    """The options of a rule by name; two are equal if they are of the same rule object."""

    #: By the id of a rule, which is kept so that its id remains its own.
    known: ClassVar[dict[int, tuple[Kron, Options]]] = {}

    def __init__(self, rule: Kron) -> None:
        self.by_name = options_of(rule)

    @classmethod
    def of(cls, rule: Kron) -> Options:
        """As they were found the last time."""
        if id(rule) not in cls.known:
            while len(cls.known) >= MOST_KNOWN:
                del cls.known[next(iter(cls.known))]
            cls.known[id(rule)] = rule, cls(rule)
        return cls.known[id(rule)][1]


# Of a step, most batches have the same: so the last few answers are kept.


@functools.lru_cache(maxsize=64)
def numbers_of(
    formulas: Formulas, options: Options, t: int | None, lr: float | None, lr_scale: float
) -> Mapping[str, float]:
    """The numbers that a step begins with, by the names of the kernel's arguments."""
    known: dict[str, Any] = {**options.by_name, "t": t, "lr": lr, "lr_scale": lr_scale}
    return {f"n{i}": number for i, number in enumerate(formulas.numbers(known))}


@functools.lru_cache(maxsize=256)
def formulas_for(
    rule: Kron, count: int, *, averages: bool, knows_t: bool = True, knows_lr: bool = True, bare: bool = False
) -> Formulas:
    """The formulas of a rule. Numbers of its options are no part of them.

    count: of factors. averages: whether there is a momentum. knows_t, knows_lr: whether the host does. bare: what is to
    be preconditioned comes as it is, in the place of the momentum if it ``averages``, and takes the place of the
    parameter when clipped.
    """
    return make_formulas(cast(Kron, stand_in(rule)), count, averages, knows_t, knows_lr, bare)


@functools.lru_cache(maxsize=256)
def make_formulas(rule: Kron, count: int, averages: bool, knows_t: bool, knows_lr: bool, bare: bool) -> Formulas:
    found = traced(rule, count, averages=averages, knows_t=knows_t, knows_lr=knows_lr, bare=bare)
    figures: dict[Value, int] = {}
    sources = [emit_function(name, function, found.inputs, figures) for name, function in found.functions.items()]
    if len(figures) > OWN_FIGURES:
        raise RuleError(f"{type(rule).__name__} needs {len(figures)} numbers, and kernels have room for {OWN_FIGURES}")
    begin, own = OfBeginning(), source_of(rule, sources)
    (x,), (_, momentum) = found.functions["shown"].results, found.functions["stepped"].results
    return Formulas(
        **{name: own[name] for name in found.functions},
        begin=source_of(rule, [emit_begin(begin, found, figures, counts=not knows_t)])["begin"],
        numbers=function_of(begin.numbers),
        shows_gradient=x is found.inputs[GRADIENT],
        keeps_momentum=momentum is not None,
    )


def emit_function(name: str, function: Function, inputs: Mapping[str, Value], figures: dict[Value, int]) -> str:
    total = Tracing(inputs[H_SQUARE].graph, SHAPE).sums((inputs[H_SQUARE], None))[0]
    named = {**inputs, "total": total}
    statements = OfMatrices(figures, {named[each]: each for each in function.given if each in named})
    results = ", ".join([statements.of(function.results[0] if each is None else each) for each in function.results])
    body = "\n".join(indented(statements.lines, 4))
    return FUNCTION.format(name=name, given=", ".join(function.given), body=body, results=results)


def emit_begin(begin: OfBeginning, found: Traced, figures: Mapping[Value, int], *, counts: bool) -> str:
    """counts: whose factors are due is not known to the host."""
    stores = {T.value: begin.of(found.inputs["t"])}
    stores[DUE.value] = "tl.load(due_flags + matrix, mask, other=0).to(tl.float32)"
    if counts:
        stores[DUE.value] = f"tl.where({begin.of(found.due)}, 1.0, 0.0)"
        stores[ACCUMULATED.value] = begin.of(found.refresh)
    stores |= {FIGURES + place: begin.of(value) for value, place in figures.items()}
    lines = [f"tl.store(figures + {i} * count + matrix, nothing + {text}, mask)" for i, text in stores.items()]
    names = [f"n{i}" for i in range(len(begin.numbers))]
    numbers = "".join(f"{name}, " for name in names)
    read = [f"{name} = number_of({name})" for name in names]
    return BEGIN.format(numbers=numbers, body="\n".join(indented([*read, *begin.lines, *lines], 4)))


def source_of(rule: Kron, parts: list[str]) -> dict[str, Any]:
    source = "\n\n".join([f'"""What {type(rule).__name__} computes around its products."""', *parts])
    return loaded(source, type(rule).__name__, beside())


@functools.cache
def beside() -> dict[str, Any]:
    """What emitted source may use of Kron's own kernels."""
    names = {name: value for name, value in vars(kron_layout).items() if name.isupper()}
    functions = dict(places_of=kron_begin.places_of, begin_matrices=kron_begin.begin_matrices)
    return {**names, **functions, "figure": kron_reads.figure, "momentum": kron_reads.momentum}
