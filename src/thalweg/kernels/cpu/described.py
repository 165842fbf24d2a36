"""How the tensors of a list are stored, told by one native call through DLPack's C interface, version 1.

A framework publishes it as a table of functions. It depends on no layout of the framework's objects, and does not
change within a major version: https://dmlc.github.io/dlpack/latest/python_spec.html.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from typing import Any

from thalweg.kernels.cpu.library import with_lock


class ExchangeTable(ctypes.Structure):
    """The functions of a framework, as DLPack lays them out."""

    _fields_ = [
        *(("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("older", ctypes.c_void_p)),
        *((name, ctypes.c_void_p) for name in ("allocate", "share", "take", "describe", "find_stream")),
    ]


def find_describe(capsule: Any) -> int | None:
    """The address of the function that describes a tensor; None if the table has none of this version."""
    read_capsule = ctypes.pythonapi.PyCapsule_GetPointer
    read_capsule.restype, read_capsule.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    table = ExchangeTable.from_address(read_capsule(capsule, b"dlpack_exchange_api"))
    return table.describe if table.major == 1 else None


@functools.cache
def address_of_item() -> int | None:
    """Where Python has its function for an item of a list."""
    return ctypes.cast(ctypes.pythonapi.PyList_GetItem, ctypes.c_void_p).value


class DescribedForm:
    """How some tensors are stored, to compare with later. Raises the framework's error if one cannot be described."""

    def __init__(self, describe: int, tensors: list[Any], *, may_move: bool) -> None:
        """may_move: whether later tensors may be others, at other addresses."""
        self.count = len(tensors)
        #: Where they are, if they may move.
        self.addresses = array("Q", bytes(8 * self.count * may_move))
        self.given = address_of_item(), describe, self.addresses.buffer_info()[0] if may_move else None
        self.words = array("q", bytes(8 * self.take(tensors, array("q"), compares=False)))
        self.take(tensors, self.words, compares=False)

    def take(self, tensors: list[Any], words: array[int], *, compares: bool) -> int:
        length: int = with_lock().thalweg_describe(tensors, self.count, *self.given, *words.buffer_info(), compares)
        return length

    def holds(self, tensors: list[Any]) -> bool:
        """Whether these tensors are as many and stored alike; then ``addresses`` has their places."""
        return len(tensors) == self.count and self.take(tensors, self.words, compares=True) >= 0
