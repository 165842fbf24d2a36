"""Runs that optax's own optimizers have started: one table of their state, and what goes on from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from thalweg.errors import StateError, read_as
from thalweg.exchange import list_names
from thalweg.given import differ
from thalweg.optax.exchange import entries_by_name, import_part, is_own, own_parts, place_like
from thalweg.optax.explain import transformations
from thalweg.optax.trees import Tree, named
from thalweg.peers import Rename, Report, check_rule, rename_parameter
from thalweg.rules import LAMB, SGD, Adafactor, AdamW, Rule
from thalweg.rules.options import number_options


class Source(NamedTuple):
    """An optimizer of optax: the part of its chain that it is known by, and how many parts come after that."""

    name: str
    rule: type[Rule]
    part: type[Any]
    after: int | None
    #: Our options that its state has no word of and that decide what the state means.
    meaning: Mapping[str, Any]


#: The parts of chains that keep something for parameters: their fields, each with our key.
KEPT: dict[type[Any], dict[str, str]] = {
    optax.ScaleByAdamState: {"mu": "exp_avg", "nu": "exp_avg_sq"},
    optax.TraceState: {"trace": "momentum_buffer"},
    optax.FactoredState: {"v_row": "row_var", "v_col": "col_var", "v": "variance"},
    optax.EmaState: {"ema": "exp_avg"},
}
TABLE = (
    Source("optax.adam", AdamW, optax.ScaleByAdamState, 1, {"weight_decay": 0.0, "amsgrad": False}),
    Source("optax.adamw", AdamW, optax.ScaleByAdamState, 2, {"amsgrad": False}),
    Source("optax.lamb", LAMB, optax.ScaleByAdamState, 3, {"grad_averaging": True}),
    Source("optax.sgd", SGD, optax.TraceState, 1, {"dampening": 0.0}),
    Source("optax.sgd", SGD, optax.EmptyState, 1, {"momentum": 0.0}),
    Source("optax.adafactor", Adafactor, optax.FactoredState, None, {"momentum_mode": "after_lr"}),
)
NAMES = tuple(dict.fromkeys(source.name for source in TABLE))


def import_peer(
    solver: optax.GradientTransformation,
    params: Tree,
    peer_state: Tree,
    source: str | None = None,
    *,
    rename: Rename | None = None,
    step: int | None = None,
) -> tuple[Tree, Report]:
    """The state with which ``solver`` continues a run of an optimizer of optax, and a report of what it took.

    peer_state: of ``optax.adafactor``, ``adam``, ``adamw``, ``lamb`` or ``sgd``, also within ``chain``. source: its
    name, as in "optax.adamw", for chains put together by hand. States do not tell options: give the solver those of the
    run. rename: from paths of parameters there to paths here. step: how many steps were taken, where the state does
    not tell (``optax.sgd`` without a schedule).

    >>> import optax
    >>> import jax.numpy as jnp
    >>> from thalweg.optax import lamb
    >>> params = {"w": jnp.ones((2, 2))}
    >>> theirs = optax.lamb(0.1)
    >>> _, their_state = theirs.update(params, theirs.init(params), params)
    >>> state, report = import_peer(lamb(0.1), params, their_state)
    >>> print(report.source, state.count)
    optax.lamb 1
    """
    start = solver.init(params)
    own = own_parts(start)
    beside = jax.tree.leaves([part for part in jax.tree.leaves(start, is_leaf=is_own) if not is_own(part)])
    if len(own) > 1 or beside:
        raise StateError(
            "the solver must be one transformation of thalweg.optax, in a chain at most with others that keep nothing: "
            "import into it alone, and put the state where wrappers of optax have it"
        )
    rule, part = own[0]
    rules = {leaf.names[0]: leaf.setting.rule for _, group in transformations(solver, params).parts for leaf in group}
    with read_as("this state"):
        chain = [*walk(peer_state)]
        peer = recognize(chain, source)
        check_rule(peer, rule)
        entries, steps = read_entries(chain, rename), count_steps(chain, step)
        expected = entries_by_name(part, params)
        check_names([*entries], [*expected])
        given = {}
        for name, theirs in entries.items():
            check_meaning(peer, name, rules[name])
            given[name] = {"step": steps, **fit_entries(theirs, expected[name])}
        renewed = import_part(part, params, given)._replace(count=place_like(steps, part.count))
    state = jax.tree.map(lambda inner: renewed if is_own(inner) else inner, start, is_leaf=is_own)
    return state, Report(peer.name, rule.__name__, len(rules), steps, untold_options(next(iter(rules.values()))))


def untold_options(rule: Rule) -> dict[str, Any]:
    """Numbers that a rule has as options."""
    options = number_options(type(rule)) - rule.idle(1.0).keys() - {"stacked_axes"}
    return {option: getattr(rule, option) for option in sorted(options)}


# ---- what a state of optax has


def walk(state: Tree, after: int = 0) -> Iterator[tuple[Any, int]]:
    """The parts of a chain, each with how many come after it in its own chain."""
    if type(state) is optax.MaskedState:
        yield from walk(state.inner_state, after)
    elif type(state) is tuple or isinstance(state, Mapping):
        parts = [*state.values()] if isinstance(state, Mapping) else [*state]
        for place, part in enumerate(parts, 1):
            yield from walk(part, len(parts) - place)
    elif type(state) in (*KEPT, optax.ScaleByScheduleState, optax.EmptyState):
        yield state, after
    else:
        known = ", ".join(part.__name__ for part in KEPT)
        raise StateError(
            f"this state has a {type(state).__name__}, which cannot be continued here: {known} can be; of a wrapper "
            "pass the state that is in it"
        )


def recognize(chain: list[tuple[Any, int]], name: str | None) -> Source:
    """The optimizer that a chain is of, by its first part that keeps something, or as it is named."""
    kinds = [(type(part), after) for part, after in chain if type(part) in KEPT and type(part) is not optax.EmaState]
    if len(kinds) > 1:
        raise StateError(f"this state has {' and '.join(kind.__name__ for kind, _ in kinds)}: pass one of them")
    kind, after = kinds[0] if kinds else (optax.EmptyState, 1)
    like = [s for s in TABLE if s.part is kind and (s.name == name if name else s.after in (None, after))]
    has_average = any(type(part) is optax.EmaState for part, _ in chain)
    if not like or (has_average and kind is not optax.FactoredState):
        raise StateError(
            f"this is no state of {name or 'an optimizer that is known'}; pass source=, of {', '.join(NAMES)}"
        )
    return like[0]


def read_entries(chain: list[tuple[Any, int]], rename: Rename | None) -> dict[str, dict[str, Any]]:
    """What is kept for each parameter, by its name here and by our keys."""
    entries: dict[str, dict[str, Any]] = {}
    for part, _ in chain:
        for attribute, key in KEPT.get(type(part), {}).items():
            tree = named(getattr(part, attribute))
            renamed = [rename_parameter(name, rename) for name in tree.names]
            if twice := [name for name, times in Counter(renamed).items() if times > 1]:
                raise StateError(f"two parameters of the source would be named {list_names(twice)}: correct rename=")
            for name, leaf in zip(renamed, tree.leaves, strict=True):
                entries.setdefault(name, {})[key] = leaf
    return entries


def check_names(theirs: list[str], ours: list[str]) -> None:
    lacking, unknown = sorted({*ours} - {*theirs}), sorted({*theirs} - {*ours})
    if lacking or unknown:
        raise StateError(
            f"the parameters do not match by name: the source lacks {list_names(lacking)}, and this solver lacks "
            f"{list_names(unknown)}; rename= takes a function or a mapping from their names to those here"
        )


def count_steps(chain: list[tuple[Any, int]], step: int | None) -> int:
    """The number of steps that a state tells, or else the caller."""
    told = {int(part.count) for part, _ in chain if "count" in part._fields}
    told |= set() if step is None else {step}
    if len(told) > 1:
        raise StateError(f"different numbers of steps were taken, {sorted(told)}: here is one count for all")
    if not told:
        raise StateError("this state does not tell how many steps it has taken: pass them as step=")
    return told.pop()


def check_meaning(peer: Source, name: str, rule: Rule) -> None:
    """Refuse options under which the entries of state are something else."""
    for option, value in peer.meaning.items():
        if option not in rule.idle(1.0) and differ(value, found := getattr(rule, option)):
            raise StateError(
                f"{peer.name} stepped {name!r} with what is {option}={value!r} here, and this solver has "
                f"{option}={found!r}: construct it with {option}={value!r}, and with all other options of the run"
            )


def fit_entries(theirs: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a parameter as they are kept here. like: those that are expected."""
    entries = {key: value for key, value in theirs.items() if key in like or value.size > 1}  # others fill places
    if {"row_var", "col_var"} <= entries.keys() & like.keys():
        if entries["row_var"].size != like["row_var"].size:  # optax calls rows what is left of the larger axis
            entries |= {"row_var": entries["col_var"], "col_var": entries["row_var"]}
        for key in ("row_var", "col_var"):  # ours keep the axis that was averaged, with size 1
            if entries[key].size == like[key].size:
                entries[key] = jnp.reshape(entries[key], like[key].shape)
    return entries
