"""Whether parameters, their gradients and their states are what they were, found by one native call."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from thalweg.kernels.cpu.library import with_lock

#: Functions of Python, and what the native code calls them.
OF_PYTHON = {
    **{"item": "PyList_GetItem", "size": "PyList_Size", "set": "PyList_SetItem", "attribute": "PyObject_GetAttr"},
    **{"next": "PyDict_Next", "type": "PyObject_Type", "release": "Py_DecRef"},
}
#: What a framework must be able to tell of a tensor.
OF_TENSORS = ("layout", "dtype", "device_type", "device_index", "axes", "sizes", "strides", "data")


class Interpreter(ctypes.Structure):
    """Functions that native code calls while it holds the interpreter's lock."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (*OF_PYTHON, *OF_TENSORS)),
        ("offset", ctypes.c_int64),
        ("keys", ctypes.c_int64),
        ("negative", ctypes.c_uint64),
    ]


def interpreter_with(functions: Mapping[str, Any], offset: int, keys: int, negative: int) -> Interpreter:
    """The functions of Python beside those of a framework. offset: of what these take in the object of a tensor.

    keys: where a tensor has a word whose bit ``negative`` says that it is the negative of what lies in memory.
    """
    of_python = {name: getattr(ctypes.pythonapi, own) for name, own in OF_PYTHON.items()}
    found = {name: ctypes.cast(each, ctypes.c_void_p) for name, each in {**of_python, **functions}.items()}
    return Interpreter(**found, offset=offset, keys=keys, negative=negative)


class Look:
    """Parameters with gradients and states, as they were when this was made."""

    def __init__(
        self,
        interpreter: Interpreter,
        given: list[list[Any]],
        order: Sequence[int],
        states: Mapping[Any, Any],
        read: list[int],
    ) -> None:
        """order: the places of those with gradients among all parameters. read: addresses of memory to fetch first."""
        self.count = sum(map(len, given))
        places = array("q", [-1]) * self.count
        for place, index in enumerate(order):
            places[index] = place
        self.addresses, self.words = array("Q", bytes(8 * len(order))), array("q")
        self.kept = interpreter, places, ctypes.c_int32(), array("Q", read)
        room = self.look(given, states)
        self.words = array("q", bytes(8 * max(0, room)))
        #: Whether all of them can be described.
        self.works = room >= 0 and self.look(given, states) == room
        self.compare = self.bind(compares=True)

    def look(self, given: list[list[Any]], states: Mapping[Any, Any]) -> int:
        """Note what is there; how many words that takes, negative if something cannot be described."""
        length: int = self.bind(compares=False)(given, [None] * self.count, states, "grad", None)
        return length

    def bind(self, *, compares: bool) -> Callable[..., int]:
        interpreter, places, negated, read = self.kept
        buffers = *places.buffer_info(), self.addresses.buffer_info()[0], ctypes.addressof(negated)
        known = *buffers, *self.words.buffer_info(), *read.buffer_info(), compares
        return functools.partial(with_lock().thalweg_look_again, ctypes.addressof(interpreter), *known)

    def find_gradients(
        self, given: list[list[Any]], states: Mapping[Any, Any]
    ) -> tuple[list[Any], array[int], bool] | None:
        """The gradients of all, where those are that there are, and whether one is the negative of what lies there.

        None if they are stored otherwise, or anything else is not what or where it was.
        """
        grads: list[Any] = [None] * self.count
        if self.compare(given, grads, states, "grad", None) < 0:
            return None
        return grads, self.addresses, self.kept[2].value != 0
