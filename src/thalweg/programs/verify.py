"""Checks of programs between their stages: after a rule was traced, and after its passes were chosen.

What no check refuses computes the same on every engine. A program that is refused has no fused code: the rule itself
is run in its place, or the error is raised where fused code was asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

from thalweg.errors import RuleError
from thalweg.programs.graph import Value
from thalweg.programs.operations import NUMBER, OPERATIONS, TRUTH

if TYPE_CHECKING:
    from thalweg.programs.schedule import Schedule
    from thalweg.programs.trace import Program

#: What to write where a truth has to be a number.
AS_NUMBER = "write xp.where(condition, 1.0, 0.0)"


def verify(program: Program) -> None:
    """Check that truths and numbers are each where they belong. Raises a RuleError."""
    for value in program.graph.values:
        if value.is_reduction and dtype_of(value.args[0]) == TRUTH:
            refuse(value, f"combines truth values, which array libraries do in different ways: {AS_NUMBER}")
        if value.op in OPERATIONS:
            check_operation(value)
    for key, result in program.results.items():
        if dtype_of(result) == TRUTH:
            what = "delta" if key == "p" else f"state {key!r}"
            raise RuleError(f"{program.rule_name}.update makes a {what} of truth values: {AS_NUMBER}")
    if dtype_of(program.finite) != TRUTH:
        wanted = "finite must be a truth value, such as xp.isfinite(x), got a number"
        raise RuleError(f"{program.rule_name}.update: {wanted}")


def refuse(value: Value, what: str) -> NoReturn:
    raise RuleError(f"{value.graph.rule_name}: {value!r} {what}")


def check_operation(value: Value) -> None:
    takes, dtypes = OPERATIONS[value.op].takes, [dtype_of(operand) for operand in value.args]
    if takes is None and NUMBER not in dtypes:
        refuse(value, f"is arithmetic of truth values alone, which array libraries do in different ways: {AS_NUMBER}")
    for number, (wanted, dtype) in enumerate(zip(takes or (), dtypes, strict=takes is not None), 1):
        if wanted and wanted != dtype:
            refuse(value, f"needs a {wanted} as operand {number}, and has a {dtype}: write a comparison, such as x > 0")


def dtype_of(operand: Any) -> str:
    """Whether a value or a Python number is a number or a truth value."""
    if not isinstance(operand, Value):
        return TRUTH if isinstance(operand, bool) else NUMBER
    if operand.op not in OPERATIONS:
        return NUMBER
    return OPERATIONS[operand.op].makes or max(map(dtype_of, operand.args[1:]), key=(TRUTH, NUMBER).index)


# ---- passes


def verify_schedule(schedule: Schedule, exact: Collection[str], *, guarded: bool, complete: bool) -> None:
    """Check that each pass can be taken from what it reads and what is known before it. Raises a RuleError.

    exact, guarded, complete: those that the passes were chosen with.
    """
    program, passes = schedule.program, schedule.passes
    large = {key for key in program.results if key not in schedule.small}
    sums = {value for value in program.needed if value.is_reduction}
    check_each_once(program, "write", [key for pass_ in passes for key in pass_.writes], large)
    check_each_once(program, "make", [value for pass_ in passes for value in pass_.sums], sums)
    known: set[Value] = set()
    written: set[str] = set()
    for number, pass_ in enumerate(passes, 1):
        where = f"{program.rule_name}, pass {number} ({pass_})"
        if again := [key for key in pass_.reads if key in written and key not in exact]:
            raise RuleError(f"{where} reads {again[0]}, which an earlier pass has written and rounded")
        if "p" in pass_.writes and "p" not in pass_.reads:
            raise RuleError(f"{where} writes p, and must read it: a step is added to it")
        if guarded and pass_.writes:
            check_known(where, program, [program.finite], {}, known)
        read = {value: key for key, value in schedule.loads(number - 1).items()}
        results = [program.results[key] for key in pass_.writes]
        check_known(where, program, [*results, *(arg for value in pass_.sums for arg in value.args)], read, known)
        known |= set(pass_.sums)
        written |= set(pass_.writes)
        if complete and number == len(passes) and pass_.sums:
            raise RuleError(f"{where} makes {pass_.sums[0]!r}, which must be complete before the last pass")
    small = [program.state[key] for key in schedule.small]
    check_known(f"{program.rule_name}, between passes", program, [*small, *program.stats.values()], {}, known)


def check_each_once(program: Program, verb: str, done: list[Any], wanted: set[Any]) -> None:
    times = Counter(done)
    for key in {**dict.fromkeys(wanted), **dict.fromkeys(done)}:
        if times[key] != 1 or key not in wanted:
            right = "once" if key in wanted else "not: nothing needs it"
            raise RuleError(f"{program.rule_name}: its passes {verb} {key!r} {times[key]} times, and must {right}")


def check_known(
    where: str, program: Program, targets: Iterable[Any], read: Collection[Value], known: set[Value]
) -> None:
    """Raise a RuleError unless targets can be computed from what is read and from complete reductions."""
    all_axes = program.memory["p"]
    waiting = [value for value in targets if isinstance(value, Value)]
    seen: set[Value] = set()
    while waiting:
        value = waiting.pop()
        if value in seen or value in read or value in known:
            continue
        seen.add(value)
        if value.is_reduction:
            raise RuleError(f"{where} needs {value!r} before it is complete")
        if value.op == "input" and value.extent == all_axes:
            raise RuleError(f"{where} needs {value.name}, and does not read it")
        waiting += value.values
