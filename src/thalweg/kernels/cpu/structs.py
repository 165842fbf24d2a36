"""The structures of ``native/abi.h``, field by field."""

from __future__ import annotations

import ctypes
from ctypes import c_int8, c_int32, c_int64, c_uint8, c_uint32, c_void_p

DTYPES = {"float32": 1, "float64": 2, "bfloat16": 3, "float16": 4, "int8": 5, "uint8": 6}
#: As abi.h has them: what a tensor, a program and a pass have room for, elements that may lie behind a factored column,
#: and the registers that every program has (the scale of the gradient, the number of elements, the largest number of
#: p), before its own.
OPERANDS, MOST_PASSES, MOST_SUMS, SLOTS, MOST_AFTER = 8, 6, 9, 2, 128
SCALE, COUNT, LARGEST, FIRST_NUMBER = 0, 1, 2, 3


class Tensor(ctypes.Structure):
    """Where one tensor lies, and how it is stored."""

    _fields_ = (
        ("operand", c_void_p * OPERANDS),
        ("scales", c_void_p * OPERANDS),
        ("record", c_void_p),
        ("size", c_int64),
        ("whole", c_int64),
        ("seen_as", c_int64 * 5),
        ("position", c_int64),
        ("scratch", c_int64),
        ("options", c_int32),
        ("group", c_int32),
        ("key", c_uint32 * OPERANDS),
        ("dtype", c_uint8 * OPERANDS),
        ("is_slice", c_uint8),
        ("high", c_uint8),
    )


class Pass(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in ("index", "operands", "written", "numbers", "sums", "kept", "squared")),
        *((name, c_int32) for name in ("row_sums", "column_sums", "rows", "columns")),
        ("operand", c_uint8 * 8),
        *((name, c_uint8 * SLOTS) for name in ("row", "column")),
        ("summed", c_uint8 * MOST_SUMS),
        ("registers", c_void_p),
        ("functions", c_void_p),
    )


class Between(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in ("index", "after_pass", "numbers", "rows", "columns", "unused")),
        ("row_state", c_int8 * (2 * SLOTS)),
        ("column_state", c_int8 * (2 * SLOTS)),
        ("registers", c_void_p),
        ("functions", c_void_p),
    )


class Instruction(ctypes.Structure):
    _fields_ = tuple((name, c_int32) for name in ("op", "to", "a", "b", "c"))


class Program(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("passes", "between", "code", "is_mean", "kept")),
        *((name, c_int32) for name in ("count", "kept_count", "code_begin")),
        ("code_end", c_int32 * MOST_PASSES),
        ("first_sum", c_int32 * MOST_PASSES),
        *((name, c_int32) for name in ("finite", "bounded", "has_short")),
    )


class Options(ctypes.Structure):
    _fields_ = (
        ("program", c_void_p),
        ("numbers", c_void_p),
        ("count", c_int32),
        ("t", c_uint32),
        ("stochastic", c_int32),
        ("guarded", c_int32),
        ("state_stochastic", c_int32),
        ("unused", c_int32),
    )


class Outcome(ctypes.Structure):
    """What a step reports of one tensor."""

    _fields_ = (("finite", c_int32), ("skip", c_int32))


#: In the order in which ``thalweg_sizeof`` counts them.
ALL: tuple[type[ctypes.Structure], ...] = (Tensor, Pass, Between, Instruction, Program, Options, Outcome)
