"""Steps on GPUs inside programs of XLA: emitted kernels, compiled to binaries, which a handler launches at every call.

The tables of addresses travel to the device as parameters of a kernel, so that nothing waits and nothing is allocated.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_char_p, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from thalweg.arrays import Shape
from thalweg.errors import RuleError
from thalweg.kernels.cpu.compiler import Uncompiled, compile_source
from thalweg.kernels.cpu.xla import place_of
from thalweg.kernels.triton.emission import OWN_FIGURES
from thalweg.kernels.triton.loading import Kernels, kernels_for
from thalweg.kernels.triton.memory import Stored
from thalweg.kernels.triton.numbers import INTERPRETED
from thalweg.kernels.triton.rows import COLUMNS, SIZE, Operand, rows_of, total_kernel
from thalweg.kernels.triton.stages import BLOCK, DECIDED, MEASURE, WARPS, WRITE
from thalweg.programs.graph import Value
from thalweg.programs.trace import GRADIENT, PARAMETER, example_of
from thalweg.rules import Rule

#: What the handler is called in programs.
TARGET = "thalweg_launch"
#: The versions of Triton whose binaries are known to be launched as they are here.
KNOWN = "3.6."
SOURCE = Path(__file__).with_name("launch.h")
DTYPES = {"float32": tl.float32, "bfloat16": tl.bfloat16, "float16": tl.float16}
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
#: Columns of the table of rows that are addresses: of the parameter, its state and its record, the step, and scales.
ADDRESSES = (0, 1, 2, 3, 4, 9, 14, 15, 16, 17)
#: Threads of a warp.
WARP = 32
#: Of arguments that are no buffers.
NUMBER = -1


class Kernel(ctypes.Structure):
    _fields_ = (("image", c_void_p), ("name", c_char_p), ("shared", c_int64))


class Launch(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in ("kernel", "threads", "first", "count")),
        ("grid", c_int32 * 3),
        ("unused", c_int32),
    )


class Argument(ctypes.Structure):
    _fields_ = (("buffer", c_int64), ("value", c_int64))


class Plan(ctypes.Structure):
    """As launch.h has it, like the structures above."""

    _fields_ = (
        *((name, c_void_p) for name in ("kernels", "launches", "arguments", "values", "places")),
        *((name, c_int64) for name in ("launch_count", "value_count", "place_count", "written", "table")),
    )


@functools.cache
def compile_handler(include: str) -> ctypes.CDLL | str:
    """The library with the handler, or why there is none. include: the folder of XLA's headers."""
    if INTERPRETED.value or not triton.__version__.startswith(KNOWN):
        return f"kernels are compiled and launched with Triton {KNOWN}*, and this is {triton.__version__}"
    headers = [Path(include, "xla", "ffi", "api", "c_api.h")]
    try:
        library = compile_source(
            SOURCE.read_text(), headers, [f"-I{include}", "-ldl"], "the launch of kernels from XLA"
        )
    except (OSError, Uncompiled) as error:
        return str(error)
    library.thalweg_plan.restype, library.thalweg_plan.argtypes = None, (c_char_p, c_void_p)
    return library


class Memory(NamedTuple):
    """Stands for a tensor where only its place, its shape and its dtype are asked for."""

    place: int
    shape: Shape
    bytes: int

    def data_ptr(self) -> int:
        return self.place

    def numel(self) -> int:
        return math.prod(self.shape)

    def element_size(self) -> int:
        return self.bytes


class Parameters(NamedTuple):
    """Parameters of one kind, whose state has the same keys and dtypes."""

    rule: Rule
    names: Sequence[str]
    shapes: Sequence[Shape]
    #: Of p, g, and the entries of the state, in the rule's order.
    dtypes: Mapping[str, str]
    lr_scale: float
    seed: int
    maximize: bool
    #: Whether there is a learning rate, and a scale of all gradients.
    rated: bool
    scaled: bool

    @property
    def keys(self) -> list[str]:
        return [key for key in self.dtypes if key not in (PARAMETER, GRADIENT)]


class Launches:
    """Launches of one step, while they are collected."""

    def __init__(self, compiled: Callable[..., Any]) -> None:
        self.compiled = compiled
        self.kernels: list[Any] = []
        self.launches: list[tuple[int, int, int, int, tuple[int, ...]]] = []
        self.arguments: list[tuple[int, int]] = []

    def add(self, kernel: Any, grid: tuple[int, ...], given: Mapping[str, Any], constants: Any, warps: int) -> None:
        """given: (type, buffer, bytes into it) or (type, NUMBER, number) by name; None for what there is not."""
        absent = {name: None for name, own in given.items() if own is None}
        made = self.compiled(kernel, given, {**constants, **absent}, warps)
        if not any(made is known for known in self.kernels):
            self.kernels.append(made)
        place = next(i for i, known in enumerate(self.kernels) if known is made)
        first = len(self.arguments)
        self.arguments += [given[name][1:] for name in kernel.arg_names if given.get(name) is not None]
        self.launches.append((place, WARP * warps, first, len(self.arguments) - first, (*grid, 1, 1)[:3]))


class Laid(NamedTuple):
    """What a step launches, and what a call of it is given.

    Arguments: p and the state of each parameter, all gradients, the numbers, the steps taken, the learning rate, the
    scale of gradients, then chunks, begins and counts. Results: p and state, figures, totals, partial sums, the table.
    """

    launches: Launches
    #: The table, and which of its numbers are places; how many buffers are written, and which is the table.
    values: list[int]
    places: list[int]
    written: int
    table: int
    #: What the numbers are, behind the sign of the gradient.
    numbers: Sequence[Value]
    chunks: list[int]
    begins: list[int]
    counts: list[int]
    results: list[tuple[Shape, str]]
    #: By name: the figure, or the number that it always is; and the rows of each parameter.
    stats: Mapping[str, int | float]
    slices: list[int]


_compiled: dict[Any, Any] = {}


def compile_for(
    capability: int, kernel: Any, given: Mapping[str, Any], constants: Mapping[str, Any], warps: int
) -> Any:
    """A kernel for GPUs of a generation, as one launch needs it."""
    target = GPUTarget("cuda", capability, WARP)
    types = {name: own[0] for name, own in given.items() if own is not None}
    key = id(kernel), tuple(types.items()), repr(sorted((k, str(v)) for k, v in constants.items())), warps, target
    if key not in _compiled:
        signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
        # sums of a pass begin anywhere among all; what is a buffer, or a table, does not
        attributes = {
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(kernel.arg_names)
            if types.get(name, "").startswith("*") and name not in ("totals", "partials")
        }
        source = triton.compiler.ASTSource(kernel, signature, dict(constants), attributes)
        made = triton.compile(source, target=target, options={"num_warps": warps})
        if getattr(made.metadata, "global_scratch_size", 0):
            raise RuleError(f"{kernel.__name__} needs memory of its own, which calls from XLA do not give it")
        _compiled[key] = made
    return _compiled[key]


def lay_out(own: Parameters, found: Launches, *, observed: bool) -> Laid:
    """observed: figures that only people look at are computed too."""
    keys, per = own.keys, 1 + len(own.keys)
    stored = tuple(Stored(key, BYTES[dtype], dtype == "float32") for key, dtype in own.dtypes.items())
    example = example_of(own.rule, own.shapes[0])
    kernels = kernels_for(own.rule, example, stored, False, False, own.rated, False)
    chunk = BLOCK * kernels.emitted.blocks
    written, buffers = per * len(own.names), itertools.count(per * len(own.names))
    gradients = [next(buffers) for _ in own.names]
    numbers, step = next(buffers), next(buffers)
    lr, scale = (next(buffers) if there else None for there in (own.rated, own.scaled))
    chunks, begins, counts = (next(buffers) for _ in range(3))
    rows: list[list[int]] = []
    moving: list[int] = []
    slices: list[int] = []
    elements: list[int] = []
    for index, (name, shape) in enumerate(zip(own.names, own.shapes, strict=True)):
        p, *entries = (
            Memory(place_of(index * per + k), shape, BYTES[own.dtypes[key]]) for k, key in enumerate([PARAMETER, *keys])
        )
        operand = Operand(name, p, tuple(entries), Memory(place_of(step), (1,), 4))
        mine = rows_of(operand, keys, own.rule.stacked_axes, own.seed)
        size = math.prod(shape[own.rule.stacked_axes :])
        rows += mine
        moving += [place_of(gradients[index]) + i * size * BYTES[own.dtypes[GRADIENT]] for i in range(len(mine))]
        slices.append(len(mine))
        elements += [max(1, size)] * len(mine)
    count, pieces = len(rows), [-(-row[SIZE.value] // chunk) for row in rows]
    total, sums = sum(pieces), max(1, sum(map(len, kernels.emitted.sums)))
    values = [value for row in rows for value in row] + moving
    places = [row * COLUMNS.value + column for row in range(count) for column in ADDRESSES]
    places += range(count * COLUMNS.value, len(values))
    first = next(buffers) + written
    figures, totals, partials, table = range(first, first + 4)
    given = {
        "rows": ("*i64", table, 0),
        "gradients": ("*i64", table, 8 * count * COLUMNS.value),
        "chunks": ("*i32", chunks, 0),
        "begins": ("*i32", begins, 0),
        "counts": ("*fp32", counts, 0),
        "numbers": ("*fp32", numbers, 0),
        "figures": ("*fp32", figures, 0),
        "totals": ("*fp32", totals, 0),
        "partials": ("*fp32", partials, 0),
        "grad_scale": None if scale is None else ("*fp32", scale, 0),
        "allowed": None,
        "lr": None if lr is None else ("*fp32", lr, 0),
        "lr_scale": ("fp32", NUMBER, *struct.unpack("<i", struct.pack("<f", own.lr_scale))),
        "count": ("i32", NUMBER, count),
        "chunk_count": ("i32", NUMBER, total),
    }
    add_passes(found, kernels, own, given, rows=count, total=total, chunk=chunk, sums=sums, observed=observed)
    results = [(shape, own.dtypes[key]) for shape in own.shapes for key in (PARAMETER, *keys)]
    results += [((OWN_FIGURES + kernels.emitted.figures, count), "float32"), ((count, sums), "float32")]
    results += [((sums, total), "float32"), ((8 * len(values),), "uint8")]
    laid = [number for owner, n in enumerate(pieces) for piece in range(n) for number in (owner, piece)]
    ends = [0, *itertools.accumulate(pieces)]
    emitted = kernels.emitted
    tables = values, places, written, table
    return Laid(found, *tables, emitted.numbers, laid, ends, elements, results, emitted.stats, slices)


def add_passes(
    found: Launches,
    kernels: Kernels,
    own: Parameters,
    given: Mapping[str, Any],
    *,
    rows: int,
    total: int,
    chunk: int,
    sums: int,
    observed: bool,
) -> None:
    """The launches of a step, as ``derived`` makes them without a guard."""
    emitted, last = kernels.emitted, len(kernels.emitted.sums) - 1
    ends = list(itertools.accumulate(map(len, emitted.sums), initial=0))
    aligned = all(math.prod(shape[own.rule.stacked_axes :]) % 8 == 0 for shape in own.shapes)
    flags = dict(
        SCALED=own.scaled or own.maximize,
        **dict(ALLOWED=False, GUARDED=False, STOCHASTIC=False, SPREAD=False, GROUP=1),
        ALIGNED=aligned or not own.rule.stacked_axes,
        P_DTYPE=DTYPES[own.dtypes[PARAMETER]],
        G_DTYPE=DTYPES[own.dtypes[GRADIENT]],
        **{f"S{i}_DTYPE": DTYPES[own.dtypes[key]] for i, key in enumerate(own.keys)},
        **dict(CHUNK=chunk, BLOCK=BLOCK),
    )

    def of(kernel: Any) -> dict[str, Any]:
        return {name: given[name] for name in kernel.arg_names if name in given}

    def go(number: int, stage: int) -> None:
        kernel = kernels.passes[number]
        found.add(kernel, (total,), of(kernel), {**flags, "STAGE": stage, "BACKWARDS": number % 2 == 1}, WARPS)

    def add_up(number: int) -> None:
        begin, end = ends[number : number + 2]
        places = {
            "partials": (*given["partials"][:2], 4 * begin * total),
            "totals": (*given["totals"][:2], 4 * begin),
            "count": given["chunk_count"],
        }
        constants = dict(SUMS=sums, BLOCK=1024)
        found.add(total_kernel, (rows, end - begin), {**of(total_kernel), **places}, constants, 4)

    def decide(number: int) -> None:
        kernel = kernels.decisions[number]
        found.add(kernel, (-(-rows // DECIDED),), of(kernel), dict(BLOCK=DECIDED), 4)

    for number in range(last):
        go(number, MEASURE)
        if emitted.sums[number]:
            add_up(number)
        decide(number)
    go(last, WRITE)
    if emitted.sums[last] and observed:
        add_up(last)
        decide(last)


#: What programs point to, as long as the process lives.
_plans: dict[str, Any] = {}


def register(library: ctypes.CDLL, laid: Laid) -> str:
    """The key under which programs call a step."""
    found, values, places, written, table, *_ = laid
    images = [made.asm["cubin"] for made in found.kernels]
    named = [made.metadata.name.encode() for made in found.kernels]
    told = repr((found.launches, found.arguments, values, places, written, table, named)).encode()
    key = hashlib.sha256(b"".join([told, *images])).hexdigest()[:32]
    if key in _plans:
        return key
    held = [ctypes.create_string_buffer(image, len(image)) for image in images]
    kernels = (Kernel * len(images))(
        *(
            Kernel(ctypes.addressof(image), name, made.metadata.shared)
            for image, name, made in zip(held, named, found.kernels, strict=True)
        )
    )
    launches = (Launch * len(found.launches))(
        *(Launch(*rest, (c_int32 * 3)(*grid), 0) for *rest, grid in found.launches)
    )
    arguments = (Argument * len(found.arguments))(*(Argument(*each) for each in found.arguments))
    numbers, placed = (c_int64 * len(values))(*values), (c_int32 * len(places))(*places)
    parts: tuple[Any, ...] = kernels, launches, arguments, numbers, placed
    counts = len(launches), len(values), len(places), written, table
    plan = Plan(*map(ctypes.addressof, parts), *counts)
    _plans[key] = plan, parts, held, named
    library.thalweg_plan(key.encode(), ctypes.addressof(plan))
    return key
