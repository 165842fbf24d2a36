"""The first and the last part of a rule that needs whole tensors, each as a rule that a machine can read.

Both go element by element, so that fused code can be made of them as of any other rule. The first one steps the one
entry that the rule keeps as if it were a parameter, and keeps what is shown as its state. The last one steps the
parameter, and takes what was made for its gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

from thalweg.arrays import Scalar, Shape, Term, is_number
from thalweg.programs.graph import Graph, needed_by
from thalweg.programs.host import function_of, options_of
from thalweg.programs.trace import GRADIENT, PARAMETER, Tracing, symbolic
from thalweg.rules.around import CARRIED, Around, entries_around, keys_around, parts_of
from thalweg.rules.entries import Count, Entry, Moment, Spread
from thalweg.rules.places import files_of
from thalweg.rules.rule import Rule, Update, stand_in
from thalweg.rules.whole import Direction, WholeRule


def shown_keys(rule: WholeRule) -> list[str]:
    """The keys under which the first part keeps what has to be seen as a whole."""
    return [f"shown_{i}" for i in range(rule.whole_tensors())]


class Adapted:
    """A space of which some functions are replaced."""

    def __init__(self, xp: Any, **functions: Any) -> None:
        self.xp = xp
        vars(self).update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.xp, name)


def decides_by_tensors(rule: WholeRule, entry_key: str, counts: tuple[str, ...]) -> bool:
    """Whether what is due in a step depends on tensors. entry_key: the key of the one entry of the first part."""
    read = {value.name for value in needed_by(trace_decision(stand_in(rule), entry_key, counts)) if value.op == "input"}
    return not read.isdisjoint((GRADIENT, PARAMETER, entry_key))


def own_keys(rule: WholeRule, shape: Shape) -> list[str]:
    """The keys of the entries of the rule itself that are laid out like the parameter."""
    around = keys_around(rule, shape)
    return [key for key in rule.keys(shape, Spread) if key not in around]


def own_key(rule: WholeRule, shape: Shape) -> str:
    """The key of the only such entry."""
    (key,) = own_keys(rule, shape)
    return key


def first_part(rule: WholeRule) -> Rule:
    inner: Any = parts_of(type(rule))[0]
    return like(rule, first_kind(inner))


def last_part(rule: WholeRule, due: Any = False) -> Rule:
    """due: what is due in the step."""
    return like(rule, last_kind(type(rule)), due_and_one=due + 1.0)


def like(rule: WholeRule, kind: type[Rule], **more: Any) -> Rule:
    return kind(**{f.name: getattr(rule, f.name) for f in fields(kind) if f.name not in more}, **more)


@functools.cache
def first_kind(cls: type[WholeRule]) -> type[Rule]:
    def entries(self: Any, shape: Shape) -> dict[str, Entry]:
        return {key: Moment() for key in shown_keys(self)}

    def update(self: Any, xp: Any, g: Any, s: Any, p: Any, *, t: Any, **_: Any) -> Update:
        shape = xp.shape(p)
        entries = cls.entries(self, shape)
        (key,) = (key for key, entry in entries.items() if isinstance(entry, Spread))
        counts = {name: 0.0 for name, entry in entries.items() if isinstance(entry, Count)}  # which the host keeps
        # what is shown is rounded when it is stored
        space: Any = Adapted(xp, rounded=lambda x, dtype: x)
        prepared = cls.prepare(self, space, g, {key: p, **counts}, p, t)
        return Update(prepared.state[key] - p, dict(zip(shown_keys(self), prepared.tensors, strict=True)), True, {})

    return make_kind(cls, "Shown", entries, update)


@functools.cache
def last_kind(cls: type[WholeRule]) -> type[Rule]:
    def entries(self: Any, shape: Shape) -> dict[str, Entry]:
        return entries_around(self, shape)

    def update(self: Any, xp: Any, g: Any, s: Any, p: Any, *, t: Any, lr: Any, lr_scale: Any, **_: Any) -> Update:
        def sums(*terms: Term) -> tuple[Any, ...]:
            """Figures are numbers here, and so are sums of them."""
            return tuple(term[0] if is_number(term[0]) else xp.sums(term)[0] for term in terms)

        direction, space = Direction(g, dict.fromkeys(cls.FIGURES, 1.0), {}), Adapted(xp, sums=sums)
        # what is around the rule has its own state, and reads no gradient
        state = {CARRIED: (None, t)} if issubclass(cls, Around) else {}
        answer = cls.apply(self, space, direction, s, p, state, due=self.due_and_one - 1.0, lr=lr * lr_scale)
        return Update(answer.delta, answer.state, True, {})

    # one more than what is due: a number that is 0 would be part of the code
    return make_kind(cls, "Taken", entries, update, __annotations__={"due_and_one": Scalar}, due_and_one=1.0)


def make_kind(cls: type[WholeRule], part: str, entries: Any, update: Any, **more: Any) -> type[Rule]:
    members = {"entries": entries, "update": update, "needs_whole": False, "PART_OF": cls, "__module__": cls.__module__}
    kind: type[Rule] = dataclass(frozen=True, kw_only=True)(type(f"{cls.__name__}{part}", (cls,), members | more))
    return kind


# ---- what the host decides


def decide_by(rule: WholeRule, entry_key: str, counts: Mapping[str, float], t: int) -> tuple[Any, dict[str, float]]:
    """What is due at step t, and the counts after it. entry_key: the key of what the rule keeps beside counts."""
    options, decide = decision_of(rule, entry_key, tuple(counts))
    due, *after = decide({**options, **counts, "t": t})
    return due if due > 1 else due != 0, dict(zip(counts, after, strict=True))


@functools.lru_cache(maxsize=64)
def decision_of(
    rule: WholeRule, entry_key: str, counts: tuple[str, ...]
) -> tuple[dict[str, Any], Callable[..., list[float]]]:
    """The options of a rule by name, and the function of options, t and counts that decides what is due."""
    return options_of(rule), make_decision(stand_in(rule), entry_key, counts)


@functools.lru_cache(maxsize=64)
def make_decision(rule: Rule, entry_key: str, counts: tuple[str, ...]) -> Callable[..., list[float]]:
    return function_of(trace_decision(rule, entry_key, counts), as_arrays=True)


@functools.lru_cache(maxsize=64)
def trace_decision(rule: Rule, key: str, counts: tuple[str, ...]) -> list[Any]:
    graph = Graph(type(rule).__name__, files_of(type(rule)))
    known = {count: graph.input(count, frozenset()) for count in counts}
    g, p, entry = (graph.input(name, frozenset((0, 1))) for name in (GRADIENT, PARAMETER, key))
    xp: Any = Adapted(Tracing(graph, (2, 2)), rounded=lambda x, dtype: x)
    prepared = cast(WholeRule, symbolic(rule, graph)).prepare(xp, g, {key: entry, **known}, p, graph.input("t", None))
    return [prepared.due, *(prepared.state[count] for count in counts)]
