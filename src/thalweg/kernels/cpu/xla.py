"""Steps inside programs of XLA: tables without addresses, which a handler fills in at every call."""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Sequence
from ctypes import c_char_p, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thalweg.errors import refusal
from thalweg.kernels.cpu import structs
from thalweg.kernels.cpu.compiled import Compiled
from thalweg.kernels.cpu.compiler import HEADERS, Uncompiled, compile_source
from thalweg.kernels.cpu.library import load
from thalweg.kernels.cpu.structs import FIRST_NUMBER
from thalweg.kernels.cpu.tables import END, WRITE, Operand, Options, Tables

#: What the handler is called in programs.
TARGET = "thalweg_step"
#: In place of addresses: the number of a buffer, from 1, and below so many bits how far into it.
PLACE_BITS = 44


class Plan(ctypes.Structure):
    """As native/xla.h has it."""

    _fields_ = (
        *((name, c_void_p) for name in ("run", "options", "tensors", "figures")),
        *((name, c_int64) for name in ("option_count", "count", "width", "figure_count", "written")),
        *((name, c_int32) for name in ("threads", "guarded", "write", "end")),
    )


@functools.cache
def compile_handler(include: str) -> ctypes.CDLL | str:
    """The library with the handler, or why there is none. include: the folder of XLA's headers."""
    if missing := refusal(load):
        return f"the native core is not available: {missing}"
    headers = [HEADERS / "abi.h", Path(include, "xla", "ffi", "api", "c_api.h")]
    try:
        source = (HEADERS / "xla.h").read_text(encoding="utf-8")
        library = compile_source(source, headers, [f"-I{include}"], "the call of native code from XLA")
    except (OSError, Uncompiled) as error:
        return str(error)
    library.thalweg_plan.restype, library.thalweg_plan.argtypes = None, (c_char_p, c_void_p)
    return library


def place_of(buffer: int) -> int:
    return (buffer + 1) << PLACE_BITS


@dataclass(frozen=True)
class NativeStep:
    """A step that programs can call by its key."""

    key: str
    tables: Tables
    workspace_bytes: int


#: What programs point to, as long as the process lives.
_plans: dict[str, Any] = {}


def lay_out(
    library: ctypes.CDLL, operands: Sequence[Operand], options: Sequence[Options], written: int, *, threads: int
) -> NativeStep:
    """operands: with places for addresses. written: how many buffers there are before those of gradients."""
    tables = Tables(operands, options)
    for target, (group, code) in zip(tables.options, tables.used, strict=True):
        handling = options[group].handling
        target.count = FIRST_NUMBER + len(code.literals)
        target.stochastic, target.guarded = handling.rounding == "stochastic", options[group].is_guarded
        target.state_stochastic = handling.state_rounding == "stochastic"
    scratch = tables.scratch_bytes(threads)
    places = [
        row * tables.width + place
        for stats, span in zip(tables.stats, tables.spans, strict=True)
        for place in stats.values()
        for row in span
    ]
    guarded = any(group.is_guarded for group in options)
    numbers = sum(target.count for target in tables.options)
    parts = [tables.count * ctypes.sizeof(structs.Tensor), len(tables.used) * ctypes.sizeof(structs.Options)]
    parts += [tables.count * ctypes.sizeof(structs.Outcome), tables.count * tables.width * 8, numbers * 8, scratch]
    flags = [(target.count, target.stochastic, target.guarded, target.state_stochastic) for target in tables.options]
    contents = [bytes(tables.tensors), repr((flags, places, written, threads)).encode()]
    key = key_of([*contents, *(part for _, code in tables.used for part in describe(code))])
    if key not in _plans:  # else it is the same, and numbers may have other names or values
        figures = (c_int64 * max(1, len(places)))(*places)
        plan = Plan(
            *(address(load().thalweg_run), ctypes.addressof(tables.options)),
            *(ctypes.addressof(tables.tensors), ctypes.addressof(figures)),
            *(len(tables.used), tables.count, tables.width, len(places), written),
            *(threads, guarded, WRITE, END),
        )
        _plans[key] = plan, figures, tables
        library.thalweg_plan(key.encode(), ctypes.addressof(plan))
    return NativeStep(key, tables, sum(parts) + 64 * (len(parts) + 1))


def address(function: Any) -> int | None:
    return ctypes.cast(function, c_void_p).value


def key_of(parts: Sequence[bytes]) -> str:
    """A key that is equal in every process for equal parts: programs compiled before find their step by it."""
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:32]


def describe(code: Compiled) -> list[bytes]:
    """The bytes of a program, without addresses."""
    names = " ".join(function.name for function in code.emitted.functions)
    structures = [*code.passes, code.between, code.native]
    return [names.encode(), *map(without_addresses, structures), bytes(code.code), *map(bytes, code.arrays)]


def without_addresses(structure: ctypes.Structure) -> bytes:
    copy = type(structure).from_buffer_copy(structure)
    for name, kind, *_ in structure._fields_:
        if kind is c_void_p:
            setattr(copy, name, None)
    return bytes(copy)
