"""The native core for CPUs: it works in place, and says itself what memory it wants for that."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from thalweg.kernels.cpu import structs
from thalweg.kernels.cpu.library import load
from thalweg.kernels.cpu.tables import Operand, Options, Tables
from thalweg.kernels.threads import num_threads, of_machine
from thalweg.plan.items import Item
from thalweg.programs.liveness import LR
from thalweg.settings import Setting


def is_served(setting: Setting) -> bool:
    """Whether native code steps a setting at all; Kron's own products are no native code."""
    return not setting.rule.needs_whole


def scratch_bytes(items: Sequence[Item]) -> int:
    """What native code asks for beside the tensors: its own answer, and the tables that describe them to it."""
    if not items:
        return 0
    settings = list(dict.fromkeys(item.setting for item in items))
    options = [Options(setting.rule_at(1), setting.handling, 1, LR, 1.0) for setting in settings]
    operands = []
    for item in items:
        tensor, keys = item.tensor, list(item.setting.rule_at(1).entries(item.whole or item.tensor.shape))
        places = (1,) * len(keys)
        dtypes = (tensor.dtype, tensor.dtype, *(item.entries[key][1] for key in keys))
        group = settings.index(item.setting)
        operands.append(Operand(tensor.name, tensor.shape, 1, 1, places, dtypes, group, whole=item.whole))
    tables = Tables(operands, options)
    rows = len(tables.tensors)
    scratch: int = load().thalweg_layout(tables.options, tables.tensors, rows, num_threads(of_machine))
    row = ctypes.sizeof(structs.Tensor) + ctypes.sizeof(structs.Outcome) + tables.width * ctypes.sizeof(ctypes.c_double)
    return scratch + rows * row
