"""A traced rule, run over arrays round by round: what needs no sum of other ranks first, then what follows from sums.

A rule calls ``xp.sums`` in the middle of its arithmetic and cannot stop there. Its graph can: the values of many lists
of tensors are computed up to their sums, one message completes the sums of all, and all go on.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from thalweg.arrays import Shape
from thalweg.programs.graph import Value, needed_by
from thalweg.programs.host import options_of
from thalweg.programs.operations import OPERATIONS
from thalweg.programs.schedule import depths
from thalweg.programs.trace import Program, example_of, trace
from thalweg.rules import Rule, Update
from thalweg.rules.rule import stand_in

#: Completes reductions over ranks: takes what ``xp.partial`` made of them, yields messages, returns their values.
Complete: TypeAlias = Callable[[Sequence[Any]], Generator[Any, Any, Sequence[Any]]]


@dataclass(frozen=True)
class Order:
    """In which order the values of a program are computed, in rounds, and how often each is used."""

    program: Program
    #: Of each round: what is computed element by element, and the reductions that it ends with.
    rounds: tuple[tuple[tuple[Value, ...], tuple[Value, ...]], ...]
    uses: Mapping[Value, int]


def order_of(program: Program) -> Order:
    needed, depth = program.needed, depths(program)
    reductions = [value for value in program.graph.values if value in needed and value.is_reduction]
    done: set[Value] = set()
    rounds = []
    for number in range(max((depth[value] for value in reductions), default=-1) + 2):
        last = [value for value in reductions if depth[value] == number]
        targets = needed_by(last) if last else needed
        computed = [v for v in program.graph.values if v in targets and v not in done and not v.is_reduction]
        rounds.append((tuple(value for value in computed if value.op != "input"), tuple(last)))
        done.update(computed, last)
    uses = Counter(arg for value in needed for arg in value.values)
    uses.update(value for value in program.answers if isinstance(value, Value))
    return Order(program, tuple(rounds), uses)


def evaluate(
    order: Order, xp: Any, inputs: dict[str, Any], complete: Complete
) -> Generator[Any, Any, tuple[Any, dict[str, Any], Any, dict[str, Any]]]:
    """Delta, state, finite and stats of a rule, as its ``update`` computes them in the space xp.

    inputs: by name; they are taken out of it when they are first needed, so that no value outlives its last use.
    """
    program, left = order.program, dict(order.uses)
    known: dict[Value, Any] = {
        value: inputs.pop(value.name) for value in program.graph.values if value.op == "input" and value in left
    }
    inputs.clear()

    def take(value: Any) -> Any:
        if not isinstance(value, Value):
            return value
        left[value] -= 1
        return known[value] if left[value] else known.pop(value)

    for values, reductions in order.rounds:
        for value in values:
            known[value] = apply(xp, value.op, [take(arg) for arg in value.args])
        if reductions:
            partials = [xp.partial(value.op, take(value.args[0]), value.axes) for value in reductions]
            known.update(zip(reductions, (yield from complete(partials)), strict=True))
            del partials
    state = {key: take(value) for key, value in program.state.items()}
    stats = {key: take(value) for key, value in program.stats.items()}
    return take(program.delta), state, take(program.finite), stats


def apply(xp: Any, op: str, args: Sequence[Any]) -> Any:
    return getattr(xp, op)(*args) if OPERATIONS[op].is_function else OPERATIONS[op].compute(*args)


# ---- programs of rules


def update_by(
    rule: Rule,
    order: Order,
    xp: Any,
    given: dict[str, Any],
    complete: Complete,
) -> Generator[Any, Any, Update]:
    """The rule's update, computed in rounds. given: p, g, the entries of the state, t, lr and lr_scale."""
    given.update(options_of(rule))
    return Update(*(yield from evaluate(order, xp, given, complete)))


def order_for(rule: Rule, declared: Rule, keys: Sequence[str], shape: Shape, *, with_lr: bool) -> Order:
    """The order of a rule for parameters of the same kind as one of this shape; a RuleError says why there is none.

    declared: the rule whose state is given, with these keys; it may be another at other steps.
    """
    example = example_of(rule, shape)
    entries = declared.entries(example)
    state = tuple((key, entries[key].shape(example, declared.stacked_axes)) for key in keys)
    return trace_order(stand_in(rule), example, state, with_lr)


@functools.lru_cache(maxsize=256)
def trace_order(rule: Rule, shape: Shape, state: tuple[tuple[str, Shape], ...], with_lr: bool) -> Order:
    return order_of(trace(rule, shape, dict(state), lr=1.0 if with_lr else None))
