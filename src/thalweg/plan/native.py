"""The native core for CPUs: it works in place, and says itself what memory it wants for that."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from thalweg.kernels.cpu import structs
from thalweg.kernels.cpu.library import load
from thalweg.kernels.cpu.plan import Operand, Options, Plan
from thalweg.kernels.shown import entries_of
from thalweg.kernels.threads import num_threads, of_machine
from thalweg.plan.items import Item, state_entries
from thalweg.settings import Setting

#: Any learning rate will do: no number is ever computed.
LR = 1e-3


def rule_name(setting: Setting) -> str:
    """The rule whose native code steps a setting, "" if there is none."""
    kinds = (kind.__name__ for kind in type(setting.rule).__mro__)
    return next((name for name in kinds if name in structs.RULES), "")


def scratch_bytes(items: Sequence[Item]) -> int:
    """What native code asks for beside the tensors: its own answer, and the tables that describe them to it."""
    if not items:
        return 0
    name = rule_name(items[0].setting)
    settings = list(dict.fromkeys(item.setting for item in items))
    options = [Options(setting.rule_at(1), setting.handling, 1, LR, 1.0) for setting in settings]
    operands = []
    for item in items:
        tensor, state = item.tensor, state_entries(item.setting, item.tensor)
        entries = [state.get(key) for key in entries_of(name, item.setting.rule, tensor.shape)]
        dtypes = (tensor.dtype, tensor.dtype, *("" if entry is None else entry[1] for entry in entries))
        places = tuple(0 if entry is None else 1 for entry in entries)
        operands.append(Operand(tensor.name, tensor.shape, 1, 1, places, dtypes, settings.index(item.setting)))
    tables = Plan(name)
    tables.lay_out(operands, options)
    rows = len(tables.tensors)
    scratch: int = load().thalweg_layout(structs.RULES[name], tables.tensors, rows, num_threads(of_machine))
    return scratch + rows * (ctypes.sizeof(structs.Tensor) + ctypes.sizeof(structs.Outcome))
