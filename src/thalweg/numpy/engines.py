"""A step of one parameter: by native code where that can serve it, or by the rule as it is."""

from __future__ import annotations

import itertools
import operator
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from thalweg.arrays import Shape, State
from thalweg.boundary import Advance, advance
from thalweg.errors import ParameterError, no_fused_code, refusal
from thalweg.kernels.cpu.admission import admit
from thalweg.kernels.cpu.library import is_here, load, warn_once
from thalweg.kernels.cpu.noise import fill_normal
from thalweg.kernels.cpu.operands import operand_of
from thalweg.kernels.cpu.tables import END, MEASURE, WRITE, GradientSquares, Operand, Options, Tables
from thalweg.kernels.threads import num_threads, of_machine
from thalweg.numpy.arrays import Arr, Name, address, span
from thalweg.rules import Rule
from thalweg.rules.checks import check_choice
from thalweg.rules.noise import tensor_id
from thalweg.settings import ParameterOptions
from thalweg.spaces import numpy as xp
from thalweg.storage import arithmetic

#: Native code, or numpy's own arithmetic; "auto" takes native code wherever it can.
Engine: TypeAlias = Literal["auto", "reference", "fused"]
#: Tells the figures of a parameter's step.
Figures: TypeAlias = Callable[[], Mapping[str, Any]]


@dataclass
class Tracked:
    """A parameter between its steps."""

    state: State[Arr]
    step: int = 0
    #: How often it was left alone.
    skipped: int = 0
    #: None until the parameter is seen (again): after its state was loaded, or options changed.
    setting: ParameterOptions | None = None
    shape: Shape | None = None
    #: Whether it is a buffer of one axis without a given shape: it may hold a matrix, and is not taken for a vector.
    is_raw: bool = False
    #: Tells the figures of the last step.
    stats: Figures = dict
    #: Why native code refuses it, "" if it does not, None: not asked yet.
    refused: str | None = None
    #: How native code was shown it the last time.
    operand: Operand | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "operand": None}  # a copy has its own memory


class Job(NamedTuple):
    """A step of one parameter, checked and ready to be taken."""

    name: Name
    weights: Arr
    gradient: Arr
    #: Where the parameter lies: first byte, and the one behind the last.
    place: tuple[int, int]
    tracked: Tracked
    setting: ParameterOptions
    #: The rule with the numbers of this step.
    rule: Rule
    t: int
    lr: float | None
    lr_scale: float

    def compute(self, grad_scale: float | None, noise: Callable[[], Arr] | None = None) -> Advance:
        """The parameter and its state after the step; nothing is written."""
        step: Any = dict(t=self.t, lr=self.lr, lr_scale=self.lr_scale, grad_scale=grad_scale, noise=noise)
        with np.errstate(all="ignore"):  # what is not finite is dealt with below, or wanted
            p, g, state = self.weights, self.gradient, self.tracked.state
            return advance(xp, self.rule, self.setting.numerics, p, g, state, tensor=tensor_id(self.name), **step)

    def draw_noise(self) -> Arr:
        """The noise of the step by native code, as ``rules.noise.normal`` gives it."""
        noise = np.empty(self.weights.shape, arithmetic(xp.dtype(self.weights)))
        stream = dict(seed=self.setting.numerics.seed, tensor=tensor_id(self.name), t=self.t)
        fill_normal(address(noise), noise.dtype.name, noise.size, **stream, threads=num_threads(of_machine))
        return noise


# ---- engines


def check_engine(engine: Any) -> None:
    """Refuse an engine that there is not, or not here."""
    check_choice("engine", engine, "auto", "reference", "fused")
    if engine == "fused" and (missing := refusal(load)):
        raise no_fused_code("", missing)


def separate(jobs: Sequence[Job]) -> list[Job]:
    """The jobs with copies of gradients that lie in the memory of a parameter, which a step writes to.

    Parameters that share memory would be stepped twice there, and are refused.
    """
    places = sorted(((*job.place, job.name) for job in jobs if job.weights.size), key=operator.itemgetter(0, 1))
    for (_, end, other), (following, _, name) in itertools.pairwise(places):
        if following < end:
            raise ParameterError(
                f"parameters {other!r} and {name!r} share memory: pass it once, with the sum of the gradients"
            )
    starts, ends = [start for start, _, _ in places], [end for _, end, _ in places]

    def is_apart(gradient: Arr) -> bool:
        low, high = span(gradient)
        return bisect_right(ends, low) == bisect_left(starts, high)

    return [job if is_apart(job.gradient) else job._replace(gradient=job.gradient.copy(order="K")) for job in jobs]


def divide(jobs: Sequence[Job], engine: Engine) -> tuple[list[Job], list[Job]]:
    """The jobs for native code, and those for the rule as it is."""
    missing = "numpy was asked for" if engine == "reference" else refusal(load)
    if missing and engine == "auto":
        warn_once(missing)
    native, others = list[Job](), list[Job]()
    for job in jobs:
        reason = missing or why_refused(job)
        if reason and engine == "fused":
            raise no_fused_code(f" for parameter {job.name!r}", reason)
        (others if reason else native).append(job)
    return native, others


def why_refused(job: Job) -> str:
    """Why native code does not step this parameter, "" if it does."""
    tracked, weights = job.tracked, job.weights
    if tracked.refused is None:  # shape and rule decide, and do not change
        tracked.refused = refusal(admit, job.rule, job.setting.numerics, weights.shape, xp.dtype(weights))
    is_in_order = all(array.flags.c_contiguous for array in (weights, *tracked.state.values()))
    return tracked.refused or ("" if is_in_order else "it, or its state, is not in C order")


class Native:
    """The native engine of one optimizer, with tables that are kept between steps."""

    def __init__(self) -> None:
        #: By the names of a step's parameters: its operands, the layouts of its options, and the tables of both.
        self.laid: dict[tuple[Name, ...], tuple[list[Operand], list[Any], Tables]] = {}
        #: Held by a step from its first table to its last figure.
        self.lock = threading.RLock()

    def __reduce__(self) -> tuple[type[Native], tuple[()]]:
        return Native, ()  # copies begin empty: addresses belong to this optimizer alone

    def measure(self, jobs: Sequence[Job], grad_scale: float | None) -> tuple[list[bool], Callable[[], list[Figures]]]:
        """For each job whether its step is to be taken, and a function that takes these and returns everyone's figures.

        Until that is called, nothing is written. Only what has changed since the last step of these jobs is laid out.
        """
        if not jobs:
            return [], list
        gradients = [np.ascontiguousarray(job.gradient) for job in jobs]
        groups: dict[Any, int] = {}
        options: list[Options] = []
        operands = []
        for job, gradient in zip(jobs, gradients, strict=True):
            key = id(job.rule), id(job.setting.numerics), job.t, job.lr, job.lr_scale
            group = groups.setdefault(key, len(options))
            if group == len(options):
                numbers = job.t, job.lr, job.lr_scale, grad_scale
                options.append(Options(job.rule, job.setting.numerics, *numbers, job.setting.rule))
            operands.append(show_job(job, group, gradient))
        tables = self.lay_out(tuple([job.name for job in jobs]), operands, options)
        tables.point(array("Q", map(address, gradients)))
        tables.fill(options, num_threads(of_machine))
        is_guarded, taken = options[0].is_guarded, [True] * len(jobs)  # the same for the whole step
        if is_guarded:
            tables.run(MEASURE, WRITE)
            taken = tables.finite()

        def write() -> list[Figures]:
            if is_guarded:
                tables.skip([not is_taken for is_taken in taken])
            tables.run(WRITE if is_guarded else MEASURE, END)
            figures = tables.figures()
            return [partial(figures.read, index, np.reshape) for index in range(len(gradients))]

        return taken, write

    def lay_out(self, names: tuple[Name, ...], operands: list[Operand], options: list[Options]) -> Tables:
        """The tables of these parameters: those of the last step, if nothing has changed."""
        layout, laid = [option.layout for option in options], self.laid.get(names)
        if laid is not None and laid[1] == layout and all(map(operator.is_, operands, laid[0])):
            return laid[2]
        # of steps by name there is one for each name; of steps of several parameters the last alone is kept
        self.laid = {key: tables for key, tables in self.laid.items() if len(key) == len(names) == 1}
        tables = Tables(operands, options)
        self.laid[names] = operands, layout, tables
        return tables


def show_job(job: Job, group: int, gradient: Arr) -> Operand:
    """The operand of a parameter for native code: the last one again, if nothing has moved but the gradient."""
    tracked, known = job.tracked, job.tracked.operand
    dtypes = xp.dtype(job.weights), xp.dtype(gradient)
    if known is not None and (known.p, known.group) == (job.place[0], group) and known.dtypes[:2] == dtypes:
        return known
    rule, shape = job.setting.rule, job.weights.shape
    tracked.operand = operand_of(rule, job.name, shape, job.weights, dtypes[1], tracked.state, place_of, group)
    return tracked.operand


def place_of(x: Arr) -> tuple[int, str]:
    return address(x), xp.dtype(x)


def squares_of(arrays: Sequence[Arr], engine: Engine) -> list[float]:
    """The sum of squares of each array, in double precision."""
    if engine == "reference" or not is_here():
        with np.errstate(all="ignore"):
            return [float(np.square(x, dtype=np.float64).sum()) for x in arrays]
    whole = [np.ascontiguousarray(x) for x in arrays]
    table = GradientSquares([(xp.dtype(x), x.size) for x in whole])
    return list(table.measure(array("Q", map(address, whole)), num_threads(of_machine)))
