"""Passes inside programs of XLA: tables without addresses, which a handler fills in at every call.

A call is one stage of a step over all tensors. What follows from its sums is XLA's, and comes back as the registers of
the next call.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Mapping, Sequence
from ctypes import c_char_p, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from thalweg.errors import refusal
from thalweg.kernels.cpu import structs
from thalweg.kernels.cpu.bounds import bound_step
from thalweg.kernels.cpu.compiled import Compiled
from thalweg.kernels.cpu.compiler import HEADERS, Uncompiled, compile_source
from thalweg.kernels.cpu.library import load
from thalweg.kernels.cpu.structs import FIRST_NUMBER
from thalweg.kernels.cpu.tables import Operand, Options, Tables

#: What the handlers are called in programs: that of passes, and that of copies.
TARGET, MOVE = "thalweg_step", "thalweg_move"
#: In place of addresses: the number of a buffer, from 1, and below so many bits how far into it.
PLACE_BITS = 44
SOURCES = [HEADERS / name for name in ("abi.h", "tiles.h", "body.h", "calls.h")]


class Plan(ctypes.Structure):
    """As native/xla.h has it."""

    _fields_ = (
        *((name, c_void_p) for name in ("run", "options", "tensors", "small", "written", "moves")),
        *((name, c_int64) for name in ("option_count", "count", "width", "written_count", "move_count")),
        *((name, c_int32) for name in ("threads", "stage")),
    )


@functools.cache
def compile_handler(include: str) -> ctypes.CDLL | str:
    """The library with the handler, or why there is none. include: the folder of XLA's headers."""
    if missing := refusal(load):
        return f"the native core is not available: {missing}"
    headers = [*SOURCES, Path(include, "xla", "ffi", "api", "c_api.h")]
    try:
        source = (HEADERS / "xla.h").read_text(encoding="utf-8")
        library = compile_source(source, headers, [f"-I{include}"], "the call of native code from XLA")
    except (OSError, Uncompiled) as error:
        return str(error)
    library.thalweg_plan.restype, library.thalweg_plan.argtypes = None, (c_char_p, c_void_p)
    library.thalweg_tell.restype, library.thalweg_tell.argtypes = c_void_p, (c_int32, c_int32)
    return library


def place_of(buffer: int, offset: int = 0) -> int:
    return ((buffer + 1) << PLACE_BITS) + offset


class Numbered:
    """A rule's passes as programs call them: registers have its sums, then the numbers of the pass that is called.

    Behind these is whether the last pass is surely finite, so that nothing has to be looked at.
    """

    def __init__(self, code: Compiled, library: ctypes.CDLL) -> None:
        self.code, emitted = code, code.emitted
        count = len(emitted.passes)
        #: Of each pass the values that it reads, and the place of its first sum among all.
        self.numbers = [pass_.numbers for pass_ in emitted.passes]
        self.sums = [pass_.sums for pass_ in emitted.passes]
        program, kinds = emitted.schedule.program, emitted.kinds
        #: Whether all that the last pass writes is surely finite; None: that is never known.
        self.bound = bound_step(program, kinds)
        #: What is given of options and the step, by name.
        self.inputs = sorted(v.name for v in program.needed if v.op == "input" and v.name not in program.memory)
        self.first_number = FIRST_NUMBER + sum(map(len, self.sums))
        self.bounded = self.first_number + max(map(len, self.numbers))
        self.registers = self.bounded + 1
        self.passes = (structs.Pass * count)(*code.passes[:count])
        read = (c_int32 * len(range(self.first_number, self.bounded)))(*range(self.first_number, self.bounded))
        for pass_ in self.passes:
            pass_.registers = ctypes.addressof(read)
        means = [value.is_mean for sums in self.sums for value in sums]
        is_mean = (ctypes.c_uint8 * max(1, len(means)))(*means)
        #: The pass that sums rows and columns; -1: none does. And what is kept of them: slots, in both directions.
        self.gathers = -1 if emitted.between is None else emitted.between.after_pass
        between = structs.Between(index=-1, after_pass=self.gathers)
        if self.gathers >= 0:
            made = emitted.passes[self.gathers]
            between.rows = max(len(emitted.rows), len(made.row_sums))
            between.columns = max(len(emitted.columns), len(made.column_sums))
            between.row_state[:] = between.column_state[:] = [-1] * len(between.row_state)
            between.functions = library.thalweg_tell(len(made.row_sums), len(made.column_sums))
        self.slots = between.rows, between.columns
        self.native = structs.Program(
            passes=ctypes.addressof(self.passes),
            between=ctypes.addressof(between),
            code=ctypes.addressof(code.code),
            is_mean=ctypes.addressof(is_mean),
            kept=ctypes.addressof(is_mean),
            count=count,
            finite=-1,
            bounded=self.bounded,
        )
        self.native.first_sum[:count] = [self.first_sum(number) for number in range(count)]
        self.held = read, is_mean, between

    def first_sum(self, number: int) -> int:
        """The register of a pass's first sum."""
        return FIRST_NUMBER + sum(map(len, self.sums[:number]))

    def describe(self) -> list[bytes]:
        """The bytes of a program, without addresses."""
        names = " ".join(function.name for function in self.code.emitted.functions)
        structures = [*self.passes, self.held[2], self.native]
        return [names.encode(), *map(without_addresses, structures), *(bytes(array) for array in self.held[:2])]


class Layout:
    """Operands as native code sees them, with places of buffers for addresses."""

    def __init__(
        self, library: ctypes.CDLL, operands: Sequence[Operand], options: Sequence[Options], *, threads: int
    ) -> None:
        self.library, self.threads = library, threads
        self.tables = tables = Tables(operands, options)
        self.codes = [Numbered(code, library) for _, code in tables.used]
        self.width = max(code.registers for code in self.codes)
        for target, (group, _), code in zip(tables.options, tables.used, self.codes, strict=True):
            numerics = options[group].numerics
            target.program, target.count = ctypes.addressof(code.native), 0
            target.stochastic, target.guarded = numerics.rounding == "stochastic", options[group].is_guarded
            target.state_stochastic = numerics.state_rounding == "stochastic"
        parts = [tables.count * ctypes.sizeof(structs.Tensor), len(tables.used) * ctypes.sizeof(structs.Options)]
        parts += [tables.count * ctypes.sizeof(structs.Outcome), tables.scratch_bytes(threads)]
        self.workspace_bytes = sum(parts) + 64 * (len(parts) + 1)

    def register(self, stage: int, written: Sequence[int], small: Mapping[int, int]) -> str:
        """The key under which programs call a stage.

        written: the arguments that it writes. small: by row, the place of a tensor's rows and columns.
        """
        tables = self.tables
        flags = [(target.stochastic, target.guarded, target.state_stochastic) for target in tables.options]
        given = repr((flags, list(written), sorted(small.items()), self.threads, stage)).encode()
        described = [part for code in self.codes for part in code.describe()]
        key = key_of([bytes(tables.tensors), given, *described])
        if key not in PLANS:  # else it is the same
            places = (c_uint64 * tables.count)(*(small.get(row, 0) for row in range(tables.count)))
            arguments = (c_int64 * max(1, len(written)))(*written)
            plan = Plan(
                run=ctypes.cast(load().thalweg_run, c_void_p).value,
                options=ctypes.addressof(tables.options),
                tensors=ctypes.addressof(tables.tensors),
                small=ctypes.addressof(places),
                written=ctypes.addressof(arguments),
                option_count=len(tables.used),
                count=tables.count,
                width=self.width,
                written_count=len(written),
                threads=self.threads,
                stage=stage,
            )
            keep_plan(self.library, key, plan, places, arguments, self)
        return key


def register_moves(library: ctypes.CDLL, moves: Sequence[int]) -> str:
    """The key under which programs make copies. moves: of each the place of what is copied, where to, and its bytes."""
    key = key_of([repr(moves).encode()])
    if key not in PLANS:
        table = (c_int64 * len(moves))(*moves)
        keep_plan(library, key, Plan(moves=ctypes.addressof(table), move_count=len(moves) // 3), table)
    return key


#: What programs point to, by the keys under which they call it, as long as the process lives.
PLANS: dict[str, Any] = {}


def keep_plan(library: ctypes.CDLL, key: str, plan: ctypes.Structure, *held: Any) -> None:
    """Have a plan found by its key. held: what it points to."""
    PLANS[key] = plan, held
    library.thalweg_plan(key.encode(), ctypes.addressof(plan))


def key_of(parts: Sequence[bytes]) -> str:
    """A key that is equal in every process for equal parts: programs compiled before find their step by it."""
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:32]


def without_addresses(structure: ctypes.Structure) -> bytes:
    copy = type(structure).from_buffer_copy(structure)
    for name, kind, *_ in structure._fields_:
        if kind is c_void_p:
            setattr(copy, name, None)
    return bytes(copy)
