"""What native code keeps between steps beside the tensors, told without any."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from thalweg.kernels.cpu import structs
from thalweg.kernels.cpu.tables import Operand, Options, Tables


def scratch_bytes(operands: Sequence[Operand], options: Sequence[Options], threads: int) -> int:
    """Its scratch, which it tells of itself, and the tables that describe the tensors to it."""
    tables = Tables(operands, options)
    row = ctypes.sizeof(structs.Tensor) + ctypes.sizeof(structs.Outcome) + tables.width * ctypes.sizeof(ctypes.c_double)
    return tables.scratch_bytes(threads) + tables.count * row
