"""Checks of programs between their stages: after a rule was traced, and after its passes were chosen.

What no check refuses computes the same on every engine. A program that is refused has no fused code: the rule itself
is run in its place, or the error is raised where fused code was asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

from thalweg.arrays import is_number
from thalweg.errors import RuleError
from thalweg.programs.graph import Extent, Value, joint_extent
from thalweg.programs.operations import NUMBER, OPERATIONS, REDUCTIONS, TRUTH

if TYPE_CHECKING:
    from thalweg.programs.schedule import Schedule
    from thalweg.programs.trace import Program

#: What to write where a truth has to be a number.
AS_NUMBER = "write xp.where(condition, 1.0, 0.0)"


def verify(program: Program) -> None:
    """Check each value of a program by the table of operations, and then its results. Raises a RuleError."""
    every = program.memory["p"] or frozenset()
    for value in program.graph.values:
        if value.op == "input":
            check_input(program, value, every)
            continue
        check_operands(value)
        if value.is_reduction:
            check_reduction(value, every)
        else:
            check_operation(value)
    check_results(program)


def refuse(value: Value, what: str) -> NoReturn:
    raise RuleError(f"{value.graph.rule_name}: {value!r} {what}")


def check_input(program: Program, value: Value, every: frozenset[int]) -> None:
    if value.args or value.axes or not value.name:
        refuse(value, "is an input, which has a name, no operands and no axes")
    if program.inputs[value.name] is not value:
        refuse(value, f"is a second input of the name {value.name!r}: each name is one value")
    if value.name in program.memory:
        if value.extent != program.memory[value.name] or not (value.extent or frozenset()) <= every:
            refuse(value, f"varies along {show(value.extent)}, and must along {show(program.memory[value.name])}")
    elif value.extent:
        refuse(value, f"varies along {show(value.extent)}, and must be one number for all elements")


def check_operands(value: Value) -> None:
    if value.op not in OPERATIONS and value.op not in REDUCTIONS:
        refuse(value, f"is no operation of programs, which are {', '.join([*OPERATIONS, *REDUCTIONS])}")
    wanted = 1 if value.is_reduction else OPERATIONS[value.op].operands
    if len(value.args) != wanted:
        refuse(value, f"has {len(value.args)} operands, and {value.op} takes {wanted}")
    for operand in value.args:
        if isinstance(operand, Value):
            if operand.graph is not value.graph or operand.index >= value.index:
                refuse(value, f"needs v{operand.index}, which is not computed before it in the same program")
        elif not is_number(operand):
            refuse(value, f"computes with a {type(operand).__name__}: operands are values and Python numbers")


def check_operation(value: Value) -> None:
    """Whether an operation of elements takes what it is given, and varies along the axes of its operands."""
    takes, given = OPERATIONS[value.op].takes, [dtype_of(operand) for operand in value.args]
    if takes is None and NUMBER not in given:
        refuse(value, f"is arithmetic of truth values alone, which array libraries do in different ways: {AS_NUMBER}")
    for number, (wanted, found) in enumerate(zip(takes or (), given, strict=takes is not None), 1):
        if wanted and wanted != found:
            refuse(value, f"needs a {wanted} as operand {number}, and has a {found}: write a comparison, such as x > 0")
    if value.axes:
        refuse(value, f"has the axes {value.axes}, and is no reduction")
    if value.extent != (right := joint_extent(value.args)):
        refuse(value, f"varies along {show(value.extent)}, and its operands along {show(right)}")


def check_reduction(value: Value, every: frozenset[int]) -> None:
    (x,) = value.args
    if not isinstance(x, Value) or x.extent is None:
        refuse(value, "combines what is one number already: reduce an array")
    if dtype_of(x) == TRUTH:
        refuse(value, f"combines truth values, which array libraries do in different ways: {AS_NUMBER}")
    if list(value.axes) != sorted(set(value.axes) & every):
        refuse(value, f"has the axes {value.axes}: they must be some of {show(every)}, each once and in order")
    if value.extent != (right := x.extent - set(value.axes)):
        refuse(value, f"varies along {show(value.extent)}, and must along {show(right)}: its axes are gone")


def dtype_of(operand: Any) -> str:
    """Whether a value or a Python number is a number or a truth value."""
    if not isinstance(operand, Value):
        return TRUTH if isinstance(operand, bool) else NUMBER
    if operand.op not in OPERATIONS:
        return NUMBER
    return OPERATIONS[operand.op].makes or max(map(dtype_of, operand.args[1:]), key=(TRUTH, NUMBER).index)


def check_results(program: Program) -> None:
    """Whether what a rule answers with is as large as it must be."""
    name, stacked = program.rule_name, frozenset(range(program.stacked_axes))
    for key, result in program.results.items():
        what = "delta" if key == "p" else f"state {key!r}"
        if not extent_of(result) <= (program.memory[key] or frozenset()):
            raise RuleError(f"{name}.update makes a {what} of more axes than the one that it was given")
        if dtype_of(result) == TRUTH:
            raise RuleError(f"{name}.update makes a {what} of truth values: {AS_NUMBER}")
    for key, result in {"finite": program.finite, **program.stats}.items():
        if not extent_of(result) <= stacked:
            raise RuleError(f"{name}.update: {key} must be one number for each tensor")
    if dtype_of(program.finite) != TRUTH:
        raise RuleError(f"{name}.update: finite must be a truth value, such as xp.isfinite(x), got a number")


def extent_of(result: Any) -> frozenset[int]:
    return (result.extent if isinstance(result, Value) else None) or frozenset()


def show(extent: Extent) -> str:
    return f"axes {sorted(extent)}" if extent else "no axis"


# ---- passes


def verify_schedule(schedule: Schedule, exact: Collection[str], *, guarded: bool, complete: bool) -> None:
    """Check that each pass can be taken from what it reads and what is known before it. Raises a RuleError.

    exact, guarded, complete: as passes were chosen for.
    """
    program, passes = schedule.program, schedule.passes
    large = {key for key in program.results if key not in schedule.small}
    sums = {value for value in program.needed if value.is_reduction}
    check_each_once(program, "write", [key for each in passes for key in each.writes], large)
    check_each_once(program, "make", [value for each in passes for value in each.sums], sums)
    known: set[Value] = set()
    written: set[str] = set()
    for number, each in enumerate(passes, 1):
        where = f"{program.rule_name}, pass {number} ({each})"
        if again := [key for key in each.reads if key in written and key not in exact]:
            raise RuleError(f"{where} reads {again[0]}, which an earlier pass has written and rounded")
        if "p" in each.writes and "p" not in each.reads:
            raise RuleError(f"{where} writes p, and must read it: a step is added to it")
        if guarded and each.writes:
            check_known(where, program, [program.finite], {}, known)
        read = {value: key for key, value in schedule.loads(number - 1).items()}
        results = [program.results[key] for key in each.writes]
        check_known(where, program, [*results, *(arg for value in each.sums for arg in value.args)], read, known)
        known |= set(each.sums)
        written |= set(each.writes)
        if complete and number == len(passes) and each.sums:
            raise RuleError(f"{where} makes {each.sums[0]!r}, which must be complete before the last pass")
    small = [program.state[key] for key in schedule.small]
    check_known(f"{program.rule_name}, between passes", program, [*small, *program.stats.values()], {}, known)


def check_each_once(program: Program, verb: str, done: list[Any], wanted: set[Any]) -> None:
    times = Counter(done)
    for each in {**dict.fromkeys(wanted), **dict.fromkeys(done)}:
        if times[each] != 1 or each not in wanted:
            right = "once" if each in wanted else "not: nothing needs it"
            raise RuleError(f"{program.rule_name}: its passes {verb} {each!r} {times[each]} times, and must {right}")


def check_known(
    where: str, program: Program, targets: Iterable[Any], read: Collection[Value], known: set[Value]
) -> None:
    """Whether these can be computed from what is read, and from reductions that are complete."""
    every = program.memory["p"]
    waiting = [value for value in targets if isinstance(value, Value)]
    seen: set[Value] = set()
    while waiting:
        value = waiting.pop()
        if value in seen or value in read or value in known:
            continue
        seen.add(value)
        if value.is_reduction:
            raise RuleError(f"{where} needs {value!r} before it is complete")
        if value.op == "input" and value.extent == every:
            raise RuleError(f"{where} needs {value.name}, and does not read it")
        waiting += value.values
