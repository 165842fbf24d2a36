"""Whether parameters, their gradients and their states are what they were, found by one native call."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from thalweg.kernels.cpu.library import with_lock

#: Functions of Python, and what the native code calls them.
OF_PYTHON = {
    **{"item": "PyList_GetItem", "size": "PyList_Size", "next": "PyDict_Next"},
    **{"type": "PyObject_Type", "release": "Py_DecRef"},
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
        grads: list[Any],
        order: Sequence[int],
        states: Mapping[Any, Any],
        read: list[int],
    ) -> None:
        """order: the places of gradients among those of all parameters. read: addresses of memory to fetch first."""
        places = array("q", [-1]) * len(grads)
        for place, index in enumerate(order):
            places[index] = place
        self.addresses, self.words = array("Q", bytes(8 * len(order))), array("q")
        self.kept = interpreter, places, ctypes.c_int32(), array("Q", read)
        self.bind()
        room = self.look(0, given, grads, states, None)
        self.words = array("q", bytes(8 * max(0, room)))
        self.bind()
        #: Whether all of them can be described.
        self.works = room >= 0 and self.look(0, given, grads, states, None) == room

    def bind(self) -> None:
        interpreter, places, negated, read = self.kept
        (first, count), (found, _), (words, room) = (
            each.buffer_info() for each in (places, self.addresses, self.words)
        )
        given = first, count, found, ctypes.addressof(negated), words, room, *read.buffer_info()
        self.look = functools.partial(with_lock().thalweg_look_again, ctypes.addressof(interpreter), *given)

    def find_gradients(
        self, given: list[list[Any]], grads: list[Any], states: Mapping[Any, Any]
    ) -> tuple[array[int], bool] | None:
        """Where gradients are now, and whether one is the negative of what lies there.

        None if they are stored otherwise, or anything else is not what or where it was.
        """
        if self.look(1, given, grads, states, None) < 0:
            return None
        return self.addresses, self.kept[2].value != 0
