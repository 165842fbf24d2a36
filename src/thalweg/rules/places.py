"""Which line of a rule is being run, for messages."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any, NamedTuple


class Place(NamedTuple):
    """A line of a file in which a rule is written."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"line {self.line} of {self.file}"


#: The methods that make a step.
METHODS = ("update", "change_gradient", "change_update")
#: Those, and the parts of one that needs whole tensors.
ALL_METHODS = (*METHODS, "prepare", "transform", "apply")


@functools.cache
def files_of(rule: type[Any], methods: tuple[str, ...] = METHODS) -> frozenset[str]:
    """The files with these methods of a rule: those of its bases too, and of what is around it."""
    functions = (inspect.unwrap(vars(base)[name]) for base in rule.__mro__ for name in methods if name in vars(base))
    return frozenset(function.__code__.co_filename for function in functions if hasattr(function, "__code__"))


def place_in(files: frozenset[str]) -> Place | None:
    """The line of one of these files that is being run now, seen from within it."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename in files:
            return Place(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back  # type: ignore[assignment]
    return None


def called_from(files: frozenset[str]) -> str:
    """The package that is being run now, called by a line of one of these files."""
    frame, called = sys._getframe(1), ""
    while frame is not None and frame.f_code.co_filename not in files:
        called = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        frame = frame.f_back  # type: ignore[assignment]
    return called


def place_of_error(files: frozenset[str], error: BaseException) -> tuple[Place | None, str]:
    """The innermost line of these files in an error's traceback, and the package that it called; "": none."""
    place, called, traceback = None, "", error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code.co_filename in files:
            place, called = Place(frame.f_code.co_filename, traceback.tb_lineno), ""
        elif not called:
            called = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        traceback = traceback.tb_next
    return place, called


def beginning_of(method: Any) -> str:
    """Where a method of a rule begins, in words; "" if Python cannot tell."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    return f" ({Place(code.co_filename, code.co_firstlineno)})" if code else ""
