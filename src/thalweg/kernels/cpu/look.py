"""Whether parameters, their gradients and their states are what they were, found by one native call."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping
from typing import Any

from thalweg.kernels.cpu.library import with_lock

#: Functions of Python, and what the native code calls them.
OF_PYTHON = {"item": "PyList_GetItem", "next": "PyDict_Next", "type": "PyObject_Type", "release": "Py_DecRef"}
#: What a framework must be able to tell of a tensor.
OF_TENSORS = ("layout", "dtype", "device_type", "device_index", "axes", "sizes", "strides", "data")


class Interpreter(ctypes.Structure):
    """Functions that native code calls while it holds the interpreter's lock."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (*OF_PYTHON, *OF_TENSORS)),
        ("offset", ctypes.c_int64),
    ]


def interpreter_with(functions: Mapping[str, Any], offset: int) -> Interpreter:
    """The functions of Python beside those of a framework. offset: of what these take in the object of a tensor."""
    of_python = {name: getattr(ctypes.pythonapi, own) for name, own in OF_PYTHON.items()}
    found = {name: ctypes.cast(each, ctypes.c_void_p) for name, each in {**of_python, **functions}.items()}
    return Interpreter(**found, offset=offset)


class Look:
    """Parameters with gradients and states, as they were when this was made."""

    def __init__(
        self,
        interpreter: Interpreter,
        params: list[Any],
        grads: list[Any],
        places: list[int],
        states: Mapping[Any, Any],
        read: list[int],
    ) -> None:
        """places: of each parameter's gradient among the gradients. read: addresses of memory that is fetched first."""
        self.interpreter, self.params = interpreter, params
        self.places, self.read = array("q", places), array("Q", read)
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
            *(self.words.buffer_info()[0], len(self.words), compares, self.read.buffer_info()[0], len(self.read)),
        )
        return length
