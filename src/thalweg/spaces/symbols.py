"""Symbols: what stands for arrays while a rule is looked at. They do arithmetic, and refuse all else with the line.

A trace runs a rule over symbols that remember what was done to them, and a trial over symbols that have shapes alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NoReturn

from thalweg.errors import RuleError
from thalweg.rules.places import called_from, place_in

#: Array libraries, whose functions a rule does not call.
LIBRARIES = ("jax", "numpy", "torch", "scipy")
FUNCTIONS = "use the functions of xp, such as xp.sqrt, xp.where and xp.sums"


class Run(ABC):
    """One run of a rule's ``update`` over symbols."""

    def __init__(self, rule_name: str, files: frozenset[str]) -> None:
        #: files: in which the rule is written.
        self.rule_name, self.files = rule_name, files

    @abstractmethod
    def apply(self, op: str, *operands: Any) -> Any:
        """The result of an elementwise operation."""

    def place(self) -> str:
        """The line of the rule that is being run."""
        place = place_in(self.files)
        return f"{self.rule_name}, {place}:" if place else f"{self.rule_name}:"

    def refuse(self, what: str) -> NoReturn:
        raise RuleError(f"{self.place()} update {what}")

    def refuse_operand(self, operand: object) -> NoReturn:
        """Refuse to compute with something that is neither a symbol nor a number."""
        package = type(operand).__module__.partition(".")[0]
        if package in LIBRARIES:
            self.refuse(f"calls a function of {package}: {FUNCTIONS}")
        self.refuse(f"computes with a {type(operand).__name__}: use arrays, options and numbers")


def _operator(op: str) -> Callable[..., Any]:
    return lambda symbol, *others: symbol.run.apply(op, symbol, *others)


def _reflected(op: str) -> Callable[..., Any]:
    return lambda symbol, other: symbol.run.apply(op, other, symbol)


def _refused(what: str) -> Any:
    """A method that refuses what the rule does."""
    return lambda symbol, *_, **__: symbol.run.refuse(what)


def _refused_function(library: str) -> Any:
    """A method that an array library asks for: the rule has called this library, or another that stands on it."""

    def method(symbol: Symbol, *_: Any, **__: Any) -> NoReturn:
        called = called_from(symbol.run.files)
        symbol.run.refuse(f"calls a function of {called if called in LIBRARIES else library}: {FUNCTIONS}")

    return method


class Symbol:
    """Stands for an array."""

    __slots__ = ("run",)

    run: Run

    __add__, __radd__ = _operator("add"), _reflected("add")
    __sub__, __rsub__ = _operator("sub"), _reflected("sub")
    __mul__, __rmul__ = _operator("mul"), _reflected("mul")
    __truediv__, __rtruediv__ = _operator("div"), _reflected("div")
    __pow__, __rpow__ = _operator("pow"), _reflected("pow")
    __and__, __rand__ = _operator("and"), _reflected("and")
    __neg__, __abs__ = _operator("neg"), _operator("abs")
    __gt__, __ge__ = _operator("gt"), _operator("ge")
    __lt__, __le__ = _operator("lt"), _operator("le")
    __eq__, __ne__ = _operator("eq"), _operator("ne")

    __hash__ = object.__hash__

    __bool__ = _refused(
        "branches on a value that is known only when it runs: use xp.where, not if, and, or, not, min or max; an "
        "option that decides how to compute is a bool, a text or an int"
    )
    __float__ = __int__ = __index__ = __complex__ = _refused(
        f"turns a value into a Python number, which is known only when it runs: {FUNCTIONS}, not those of math"
    )
    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ipow__ = __iand__ = _refused(
        "changes a value in place, which may be the gradient or the parameter itself: write x = x + y, not x += y"
    )
    __setitem__ = __delitem__ = _refused("changes a part of a value in place: use xp.where")
    __getitem__ = __iter__ = __len__ = __contains__ = _refused(
        "takes a part of a value: a rule works on whole arrays, by xp"
    )
    __matmul__ = __rmatmul__ = _refused("uses @: use xp.matmul")
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __divmod__ = __round__ = _refused(
        "uses //, % or round(): use xp.floor"
    )
    __or__ = __ror__ = __invert__ = _refused("uses | or ~ on truth values: use &, the opposite comparison or xp.where")
    __array__ = __array_ufunc__ = __array_function__ = _refused_function("numpy")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        symbol = next(x for x in (*args, *(kwargs or {}).values()) if isinstance(x, Symbol))
        symbol.run.refuse(f"calls a function of torch: {FUNCTIONS}")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__") or name == "run":
            raise AttributeError(name)
        called = called_from(self.run.files)
        if called in LIBRARIES:
            self.run.refuse(f"calls a function of {called}: {FUNCTIONS}")
        instead = "xp.shape(x)" if name in ("shape", "ndim", "size") else "the functions of xp, such as xp.sums"
        self.run.refuse(f"asks an array for .{name}, which not every array has: use {instead}")
