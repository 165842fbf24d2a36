"""Whether parameters, their gradients and their states are what they were, found by one native call.

A framework describes its tensors through DLPack's exchange interface, a table of functions that native code can call.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping
from typing import Any

from thalweg.kernels.cpu.library import reason_missing, with_lock

#: The version of DLPack whose interface is known here, and the place of the function that describes a tensor.
MAJOR, DESCRIBE = 1, 5


class Interpreter(ctypes.Structure):
    """Functions that native code calls while it holds the interpreter's lock."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("item", "next", "type", "release", "clear_error", "describe")]


def interpreter_with(capsule: Any) -> Interpreter | None:
    """The functions of Python, and what describes a tensor of the framework whose capsule this is; None without it."""
    if capsule is None or reason_missing() is not None:
        return None
    open_capsule = ctypes.pythonapi.PyCapsule_GetPointer
    open_capsule.restype, open_capsule.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    table = open_capsule(capsule, b"dlpack_exchange_api")
    major = ctypes.c_uint32.from_address(table).value
    describe = ctypes.c_void_p.from_address(table + DESCRIBE * ctypes.sizeof(ctypes.c_void_p)).value
    if major != MAJOR or not describe:
        return None
    names = "PyList_GetItem", "PyDict_Next", "PyObject_Type", "Py_DecRef", "PyErr_Clear"
    functions = [ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p) for name in names]
    return Interpreter(*functions, describe)


class Look:
    """Parameters with gradients and states, as they were when this was made."""

    def __init__(
        self,
        interpreter: Interpreter,
        params: list[Any],
        grads: list[Any],
        places: list[int],
        states: Mapping[Any, Any],
    ) -> None:
        """places: of each parameter's gradient among the gradients."""
        self.interpreter, self.params, self.places = interpreter, params, array("q", places)
        self.words = array("q")
        room = self.look(grads, states, compares=False)
        self.words = array("q", bytes(8 * max(0, room)))
        #: Whether all of them can be described.
        self.works = room >= 0 and self.look(grads, states, compares=False) == room

    def find_gradients(self, grads: list[Any], states: Mapping[Any, Any]) -> array[int] | None:
        """Where gradients are now; None if they are stored otherwise, or anything else is not what or where it was."""
        return self.addresses if self.look(grads, states, compares=True) >= 0 else None

    def look(self, grads: list[Any], states: Mapping[Any, Any], *, compares: bool) -> int:
        """How many words there are; negative if something cannot be described or is not what it was."""
        self.addresses = array("Q", bytes(8 * len(self.params)))
        length: int = with_lock().thalweg_look(
            *(ctypes.byref(self.interpreter), self.params, grads, states),
            *(self.places.buffer_info()[0], len(self.params), self.addresses.buffer_info()[0]),
            *(self.words.buffer_info()[0], len(self.words), compares),
        )
        return length
