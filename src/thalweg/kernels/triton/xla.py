"""Steps on GPUs inside programs of XLA: emitted kernels, compiled to binaries, which a handler launches at every call.

What is launched is recorded once, from the passes that step torch's tensors, over buffers that stand for those of a
call. Addresses travel to the device as parameters of a kernel, so that nothing waits and nothing is allocated.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_char_p, c_int32, c_int64, c_void_p
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget

from thalweg.arrays import Axes, Shape
from thalweg.codecs import scale_key
from thalweg.errors import RuleError
from thalweg.kernels.cpu.compiler import HEADERS, Uncompiled, compile_source
from thalweg.kernels.cpu.xla import PLACE_BITS, PLANS, keep_plan, key_of, place_of
from thalweg.kernels.triton.numbers import INTERPRETED
from thalweg.kernels.triton.passes import Passes, Step, Sum
from thalweg.kernels.triton.rows import Operand
from thalweg.programs.graph import Value
from thalweg.programs.trace import PARAMETER
from thalweg.rules import Rule
from thalweg.settings import Numerics
from thalweg.storage import RECORD, Kept

#: What the handlers are called in programs: that of kernels, and that of products by cuBLAS.
TARGET, MULTIPLY = "thalweg_launch", "thalweg_multiply"
#: The versions of Triton whose binaries are known to be launched as they are here.
KNOWN = "3.6."
SOURCES = [Path(__file__).with_name(name) for name in ("launch.h", "multiply.h")]
#: By dtype: bytes, and what Triton calls it.
DTYPES = {
    "float32": (4, "fp32"),
    "bfloat16": (2, "bf16"),
    "float16": (2, "fp16"),
    "int64": (8, "i64"),
    "int32": (4, "i32"),
    "int8": (1, "i8"),
    "uint8": (1, "u8"),
    "bool": (1, "i1"),
}
TYPECODES = {"i": "int32", "q": "int64", "f": "float32"}
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


class Map(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in ("type", "width", "swizzle")),
        ("shape", c_int32 * 3),
        ("block", c_int32 * 3),
    )


class Argument(ctypes.Structure):
    _fields_ = (("buffer", c_int64), ("value", c_int64), ("map", c_void_p))


class Plan(ctypes.Structure):
    """As launch.h has it, like the structures above."""

    _fields_ = (
        *((name, c_void_p) for name in ("kernels", "launches", "arguments", "values")),
        *((name, c_int64) for name in ("launch_count", "value_count", "inputs")),
    )


@functools.cache
def compile_handler(include: str) -> ctypes.CDLL | str:
    """The library with the handlers, or why there is none. include: the folder of XLA's headers."""
    if INTERPRETED.value or not triton.__version__.startswith(KNOWN):
        return f"kernels are compiled and launched with Triton {KNOWN}*, and this is {triton.__version__}"
    headers = [HEADERS / "calls.h", HEADERS / "abi.h", Path(include, "xla", "ffi", "api", "c_api.h")]
    try:
        source = "".join(path.read_text() for path in SOURCES)
        library = compile_source(source, headers, [f"-I{include}", "-ldl"], "the launch of kernels from XLA")
    except (OSError, Uncompiled) as error:
        return str(error)
    library.thalweg_plan.restype, library.thalweg_plan.argtypes = None, (c_char_p, c_void_p)
    return library


# ---- what a step launches


@dataclass(frozen=True)
class Memory:
    """A buffer of a call, or a part of one: stands for a tensor where its place, shape and dtype are asked for."""

    buffer: int
    shape: Shape
    dtype: str
    #: Bytes from the beginning of the buffer.
    offset: int = 0
    #: Elements from one row to the next.
    width: int = 0

    def data_ptr(self) -> int:
        return place_of(self.buffer) + self.offset

    def numel(self) -> int:
        return math.prod(self.shape)

    def element_size(self) -> int:
        return DTYPES[self.dtype][0]

    def stride(self, axis: int) -> int:
        return self.width or math.prod(self.shape[axis + 1 :])

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: slice | tuple[slice, slice]) -> Memory:
        """Some rows, or some columns of all rows."""
        axis, chosen = (1, index[1]) if isinstance(index, tuple) else (0, index)
        begin, end, _ = chosen.indices(self.shape[axis])
        shape = *self.shape[:axis], max(0, end - begin), *self.shape[axis + 1 :]
        before = begin * (1 if axis else self.stride(0)) * self.element_size()
        return replace(self, shape=shape, offset=self.offset + before, width=self.stride(0))


class Launched(NamedTuple):
    kernel: Any
    threads: int
    grid: tuple[int, ...]
    #: (buffer, bytes into it), (NUMBER, number), or (buffer, bytes into it, the fields of a map of it).
    arguments: Sequence[tuple[Any, ...]]


@dataclass
class Recording:
    """Makes memory for passes and notes what they launch, in the place of a device."""

    #: Compiles a kernel for arguments of these types, constants and warps.
    compiled: Callable[..., Any]
    device: Any = None
    captured: tuple[()] = ()
    buffers: list[Memory] = field(default_factory=list)
    #: By buffer: what is in it.
    constants: dict[int, array[Any]] = field(default_factory=dict)
    #: The table of addresses, which is a buffer too.
    addresses: list[int] = field(default_factory=list)
    calls: list[list[Launched]] = field(default_factory=lambda: [[]])
    #: After each call but the last.
    sums: list[Sequence[Sum]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.table_of_addresses = self.take((), "uint8")

    def take(self, shape: Shape, dtype: str) -> Memory:
        """A buffer of the call."""
        self.buffers.append(Memory(len(self.buffers), shape, dtype))
        return self.buffers[-1]

    def is_capturing(self) -> bool:
        return False

    def empty(self, shape: Shape, dtype: str = "float32") -> Memory:
        if dtype == "int64":  # addresses, which follow
            return self.table(array("q", [1 << PLACE_BITS]) * math.prod(shape))
        return self.take(shape, dtype)

    def table(self, values: array[Any], columns: int | None = None) -> Memory:
        shape = (len(values),) if columns is None else (len(values) // columns, columns)
        if values.typecode == "q" and any(value >> PLACE_BITS for value in values):
            self.addresses += [0] * (len(self.addresses) % 2)  # the widest loads are of two
            offset = 8 * len(self.addresses)
            self.addresses += values
            return replace(self.table_of_addresses, shape=shape, dtype="int64", offset=offset)
        memory = self.take(shape, TYPECODES[values.typecode])
        self.constants[memory.buffer] = values
        return memory

    def refill(self, table: Memory, values: Sequence[int]) -> None:
        self.addresses[table.offset // 8 : table.offset // 8 + len(values)] = values

    def run(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        arguments: tuple[Any, ...],
        constants: Callable[[], dict[str, Any]],
        *,
        warps: int,
        key: Any = (),
    ) -> None:
        given = dict(zip(kernel.arg_names, arguments, strict=False))
        absent = {name: None for name, value in given.items() if value is None}
        kinds = {name: kind_of_argument(value) for name, value in given.items() if value is not None}
        binary = self.compiled(kernel, kinds, {**constants(), **absent}, warps)
        passed = [argument_of(value) for value in arguments if value is not None]
        self.calls[-1].append(Launched(binary, WARP * warps, (*grid, 1, 1)[:3], passed))

    def cut(self, sums: Sequence[Sum] = ()) -> None:
        """Begin another call. sums: to be completed over devices before it."""
        self.calls.append([])
        self.sums.append(sums)


def kind_of_argument(value: Any) -> tuple[str, bool]:
    """Its type, and whether it is known to be a multiple of 16."""
    if isinstance(value, Memory):
        return "*" + DTYPES[value.dtype][1], value.offset % 16 == 0
    return "fp32" if isinstance(value, float) else "i32", False


def argument_of(value: Any) -> tuple[int, int]:
    if isinstance(value, Memory):
        return value.buffer, value.offset
    return NUMBER, *(struct.unpack("<i", struct.pack("<f", value)) if isinstance(value, float) else (value,))


class Parameters(NamedTuple):
    """Parameters of one kind, whose state has the same keys and dtypes."""

    rule: Rule
    numerics: Numerics
    names: Sequence[str]
    shapes: Sequence[Shape]
    #: Of p and g.
    dtypes: tuple[str, str]
    #: Of each parameter: shapes and dtypes of all that is kept for it.
    states: Sequence[Mapping[str, Kept]]
    lr_scale: float
    #: Whether there is a learning rate, and a scale of all gradients.
    rated: bool
    scaled: bool
    #: The shapes of the whole parameters, if these are parts of them.
    wholes: Sequence[Shape] | None = None


class Part(NamedTuple):
    """Some columns of a result, and over which axes of parameters they are sums."""

    result: int
    first: int
    end: int
    axes: Axes


class Recorded(NamedTuple):
    """What a step launches, and what its calls are given.

    Arguments: what is read alone (gradients, the numbers, the steps taken, the learning rate, the scale of gradients,
    whether the step is allowed, tables), p and state of each parameter, and scratch, but for the first call. Results: p
    and state, scratch, the table of addresses.
    """

    calls: list[list[Launched]]
    #: After each call but the last: sums to be completed over devices.
    sums: list[list[Part]]
    #: The table of addresses, with places of buffers.
    addresses: list[int]
    #: What the numbers are, behind the sign of the gradient.
    numbers: Sequence[Value]
    inputs: int
    tables: list[array[Any]]
    results: list[tuple[Shape, str]]
    #: Which results are figures, and whether each parameter's step is finite.
    figures: int
    finite: int
    #: By name: the figure, or the number that it always is; and the rows of each parameter.
    stats: Mapping[str, int | float]
    slices: list[int]


def record(group: Parameters, compiled: Callable[..., Any], *, observed: bool) -> Recorded:
    """Run the passes of a step over buffers, and note launches. observed: compute figures for users to look at too."""
    recording, guarded = Recording(compiled), group.numerics.on_nonfinite != "propagate"
    p_dtype, g_dtype = group.dtypes
    grads = [recording.take(shape, g_dtype) for shape in group.shapes]
    numbers, *singles = (recording.take((1,), "float32") for _ in range(4))
    allowed = recording.take((1,), "int32")
    count, lr, scale = singles
    keys = tuple(group.rule.entries((group.wholes or group.shapes)[0]))
    written, operands = [], []
    wholes: Sequence[Shape | None] = group.wholes or [None] * len(group.shapes)
    for name, shape, state, whole in zip(group.names, group.shapes, group.states, wholes, strict=True):
        p = recording.take(shape, p_dtype)
        arrays = {key: recording.take(*entry) for key, entry in state.items()}
        written += [p, *arrays.values()]
        scales = tuple(arrays.get(scale_key(key)) for key in (PARAMETER, *keys))
        entries = tuple(arrays.get(key) for key in keys)
        operands.append(Operand(name, p, entries, count, scales, arrays.get(RECORD), shape=whole))
    memory: dict[str, Any] = dict(uploads=recording, compiled=recording, counted=False)
    sharded = group.wholes is not None
    passes = Passes(operands, grads, group.rule, group.numerics, keys, sharded=sharded, rated=group.rated, **memory)
    passes.options = numbers
    step = Step(lr if group.rated else None, group.lr_scale, scale if group.scaled else None)
    for sums in passes.measure(step):
        if sharded:
            recording.cut(sums)
    if guarded:
        recording.cut()
        step = step._replace(allowed=allowed)
    passes.write(step, observed=observed)
    inputs = [*grads, numbers, count, *([lr] if group.rated else []), *([scale] if group.scaled else [])]
    return number_buffers(recording, passes, [*inputs, *([allowed] if guarded else [])], written)


def number_buffers(recording: Recording, passes: Passes, inputs: list[Memory], written: list[Memory]) -> Recorded:
    """Buffers in the order of a call's, without those that nothing uses."""
    used = {buffer for call in recording.calls for launch in call for buffer, *_ in launch.arguments}
    used |= {passes.figures.buffer, passes.finite.buffer}
    known = {memory.buffer for memory in (*inputs, *written, recording.table_of_addresses)}
    others = [memory for memory in recording.buffers if memory.buffer in used - known]
    tables = [memory for memory in others if memory.buffer in recording.constants]
    scratch = [memory for memory in others if memory.buffer not in recording.constants]
    results = [*written, *scratch, replace(recording.table_of_addresses, shape=(8 * len(recording.addresses),))]
    order = [memory.buffer for memory in (*inputs, *tables, *results)]
    place = {buffer: index for index, buffer in enumerate(order)} | {NUMBER: NUMBER}
    below = (1 << PLACE_BITS) - 1
    addresses = [
        place_of(place[(value >> PLACE_BITS) - 1]) + (value & below) if value >> PLACE_BITS else value
        for value in recording.addresses
    ]
    calls = [
        [launch._replace(arguments=[(place[buffer], value) for buffer, value in launch.arguments]) for launch in call]
        for call in recording.calls
    ]
    first = len(inputs) + len(tables)

    def part_of(sum_: Sum) -> Part:
        buffer, begin = recording.buffers[sum_.tensor.buffer], sum_.tensor.offset // sum_.tensor.element_size()
        end = begin + sum_.tensor.shape[-1]
        return Part(place[buffer.buffer] - first, begin, end, sum_.axes)

    return Recorded(
        calls,
        [[part_of(sum_) for sum_ in sums] for sums in recording.sums],
        addresses,
        passes.printed.numbers,
        first,
        [in_words(recording.constants[memory.buffer]) for memory in tables],
        [(memory.shape, memory.dtype) for memory in results],
        place[passes.figures.buffer] - first,
        place[passes.finite.buffer] - first,
        passes.printed.stats,
        passes.tables.slices,
    )


def in_words(values: array[Any]) -> array[Any]:
    """A table without numbers of 64 bits, which JAX has on request alone."""
    return array("i", values.tobytes()) if values.typecode == "q" else values


# ---- for the handler


_compiled: dict[Any, Any] = {}


def compile_for(
    capability: int,
    kernel: Any,
    kinds: Mapping[str, tuple[str, bool]],
    constants: Mapping[str, Any],
    warps: int,
    stages: int = 3,
) -> Any:
    """A kernel for GPUs of a generation, as one launch needs it."""
    target, options = GPUTarget("cuda", capability, WARP), {"num_warps": warps, "num_stages": stages}
    settings = repr(sorted((k, str(v)) for k, v in {**constants, **options}.items()))
    key = kernel, tuple(kinds.items()), settings, target
    if key not in _compiled:
        types = {name: kind for name, (kind, _) in kinds.items()}
        signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
        attributes = {
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(kernel.arg_names)
            if kinds.get(name, ("", False))[1]
        }
        source = triton.compiler.ASTSource(kernel, signature, dict(constants), attributes)
        binary = triton.compile(source, target=target, options=options)
        if getattr(binary.metadata, "global_scratch_size", 0):
            raise RuleError(f"{kernel.__name__} needs memory of its own, which calls from XLA do not give it")
        _compiled[key] = binary
    return _compiled[key]


def register(library: ctypes.CDLL, call: Sequence[Launched], inputs: int, addresses: Sequence[int] = ()) -> str:
    """The key under which programs make a call. inputs: how many buffers are read alone. addresses: their table."""
    kernels: list[Any] = []
    for launch in call:
        if not any(launch.kernel is earlier for earlier in kernels):
            kernels.append(launch.kernel)
    places = [next(i for i, earlier in enumerate(kernels) if earlier is launch.kernel) for launch in call]
    images = [kernel.asm["cubin"] for kernel in kernels]
    named = [kernel.metadata.name.encode() for kernel in kernels]
    launched = repr((places, [launch[1:] for launch in call], addresses, inputs, named)).encode()
    key = key_of([launched, *images])
    if key in PLANS:
        return key
    held = [ctypes.create_string_buffer(image, len(image)) for image in images]
    launches: list[Launch] = []
    arguments: list[Argument] = []
    maps: list[Map] = []
    for place, launch in zip(places, call, strict=True):
        grid = (c_int32 * 3)(*launch.grid)
        launches.append(Launch(place, launch.threads, len(arguments), len(launch.arguments), grid, 0))
        for buffer, value, *fields in launch.arguments:
            maps += (Map(*layout[:3], (c_int32 * 3)(*layout[3:6]), (c_int32 * 3)(*layout[6:])) for layout in fields)
            arguments.append(Argument(buffer, value, ctypes.addressof(maps[-1]) if fields else None))
    parts: tuple[Any, ...] = (
        (Kernel * len(images))(
            *(
                Kernel(ctypes.addressof(image), name, kernel.metadata.shared)
                for image, name, kernel in zip(held, named, kernels, strict=True)
            )
        ),
        (Launch * len(launches))(*launches),
        (Argument * len(arguments))(*arguments),
        (c_int64 * len(addresses))(*addresses),
    )
    plan = Plan(*map(ctypes.addressof, parts), len(launches), len(addresses), inputs)
    keep_plan(library, key, plan, parts, held, named, maps)
    return key
