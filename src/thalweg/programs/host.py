"""Numbers that the host computes from options and the step, in double precision, as a Python function."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from thalweg.arrays import is_number
from thalweg.programs.graph import Value
from thalweg.programs.operations import OPERATIONS
from thalweg.rules import Rule


def quotient(a: float, b: float) -> float:
    """a / b as arrays have it: nothing is raised."""
    if b != 0:
        return a / b
    return math.nan if a == 0 or a != a else math.copysign(math.inf, a) * math.copysign(1.0, b)


def power(a: float, b: float) -> float:
    try:
        return float(a**b)
    except (ZeroDivisionError, OverflowError):
        return math.inf


#: What is computed of numbers: as Python does, where arrays raise nothing either.
COMPUTE: Mapping[str, Callable[..., Any]] = {
    **{name: operation.compute for name, operation in OPERATIONS.items()},
    "div": quotient,
    "pow": power,
}


def single(x: float) -> float:
    """x with the digits of float32."""
    return ctypes.c_float(x).value


def function_of(operands: Iterable[Any], *, as_arrays: bool = False) -> Callable[[Mapping[str, float]], list[float]]:
    """A Python function that computes these values from a dict of inputs by name; none may depend on tensors.

    as_arrays: what is one number for each tensor has the digits of float32, as in an array.
    """
    lines: list[str] = []
    known: dict[Value, str] = {}

    def write(operand: Any) -> str:
        if not isinstance(operand, Value):
            return repr(operand)
        if operand not in known:
            if operand.op == "input":
                text = f"given[{operand.name!r}]"
            else:
                args = [write(arg) for arg in operand.args]
                text = f"_{operand.op}({', '.join(args)})"
                if as_arrays and operand.extent is not None:
                    text = f"_single(_{operand.op}({', '.join(f'_single({arg})' for arg in args)}))"
            known[operand] = f"v{len(known)}"
            lines.append(f"    {known[operand]} = {text}")
        return known[operand]

    results = [write(operand) for operand in operands]
    return function_from("\n".join([*lines, f"    return [{', '.join(f'float({r})' for r in results)}]"]))


@functools.lru_cache(maxsize=1024)
def function_from(body: str) -> Callable[[Mapping[str, float]], list[float]]:
    """Compile the body of a function of ``given``, once for all programs with the same body."""
    operations = {f"_{name}": compute for name, compute in COMPUTE.items()}
    names: dict[str, Any] = {"inf": math.inf, "nan": math.nan, "_single": single, **operations}
    exec(compile(f"def numbers(given):\n{body}", "<numbers of a program>", "exec"), names)
    numbers: Callable[[Mapping[str, float]], list[float]] = names["numbers"]
    return numbers


def numbers_in(xp: Any, operands: Iterable[Any], given: Mapping[str, Any]) -> list[Any]:
    """The numbers of these values, where inputs may be arrays: operations are those of the space ``xp``."""
    known: dict[Value, Any] = {}

    def compute(operand: Any) -> Any:
        if not isinstance(operand, Value):
            return operand
        if operand not in known and operand.op == "input":
            known[operand] = given[operand.name]
        elif operand not in known:
            args, operation = [compute(arg) for arg in operand.args], OPERATIONS[operand.op]
            in_space = getattr(xp, operand.op) if operation.is_function else operation.compute
            known[operand] = (COMPUTE[operand.op] if all(map(is_number, args)) else in_space)(*args)
        return known[operand]

    return [compute(operand) for operand in operands]


def options_of(rule: Rule) -> dict[str, Any]:
    """The options of a rule under the names of their inputs."""
    options: dict[str, Any] = {}
    for name, value in vars(rule).items():
        options[name] = value
        if isinstance(value, tuple):
            options.update({f"{name}[{i}]": entry for i, entry in enumerate(value)})
    return options
