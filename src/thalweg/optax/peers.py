"""Runs that optax's own optimizers have started: one table of their state, and what goes on from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from thalweg.errors import StateError, read_as
from thalweg.exchange import pack_state
from thalweg.given import differ
from thalweg.optax.exchange import import_state
from thalweg.optax.explain import transformations
from thalweg.optax.states import is_own, own_parts
from thalweg.optax.trees import Tree, named
from thalweg.peers import Source, choose
from thalweg.rules import LAMB, SGD, Adafactor, AdamW, Rule


@dataclass(frozen=True)
class Peer(Source):
    """An optimizer of optax: the part of its chain that it is known by, and how many parts come after that."""

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
    Peer("optax.adam", AdamW, optax.ScaleByAdamState, 1, {"weight_decay": 0.0, "amsgrad": False}),
    Peer("optax.adamw", AdamW, optax.ScaleByAdamState, 2, {"amsgrad": False}),
    Peer("optax.lamb", LAMB, optax.ScaleByAdamState, 3, {"grad_averaging": True}),
    Peer("optax.sgd", SGD, optax.TraceState, 1, {"dampening": 0.0}),
    Peer("optax.sgd", SGD, optax.EmptyState, 1, {"momentum": 0.0}),
    Peer("optax.adafactor", Adafactor, optax.FactoredState, None, {"momentum_mode": "after_lr"}),
)


def import_peer(
    solver: optax.GradientTransformation, params: Tree, peer_state: Tree, source: str | None = None
) -> Tree:
    """The state with which ``solver`` continues a run of an optimizer of optax.

    peer_state: of ``optax.adafactor``, ``adam``, ``adamw``, ``lamb`` or ``sgd``, also within ``chain``. source: its
    name, as in "optax.adamw", for chains put together by hand. States do not tell options: give the solver those of the
    run. Of ``optax.sgd`` without a schedule, which counts no steps, one is taken to be done.

    >>> import optax
    >>> import jax.numpy as jnp
    >>> from thalweg.optax import lamb
    >>> params = {"w": jnp.ones((2, 2))}
    >>> theirs = optax.lamb(0.1)
    >>> _, their_state = theirs.update(params, theirs.init(params), params)
    >>> print(import_peer(lamb(0.1), params, their_state).count)
    1
    """
    start = solver.init(params)
    (rule, _, expected), *more = own_parts(start, params)
    if more or any(not is_own(other) for other in jax.tree.leaves(start, is_leaf=is_own)):
        raise StateError(
            "the solver must be one transformation of thalweg.optax, in a chain at most with others that keep nothing: "
            "import into it alone, and put the state where wrappers of optax have it"
        )
    with read_as("this state"):
        chain = [*walk(peer_state)]
        peer = choose(TABLE, alike(chain, source), source, rule)
        steps, theirs = count_steps(chain), read_entries(chain) or {name: {} for name in expected}
        entries = {name: {"step": steps, **fit_entries(old, expected.get(name, {}))} for name, old in theirs.items()}
        for _, leaves in transformations(solver, params).parts:
            for leaf in leaves:
                check_meaning(peer, leaf.name, leaf.setting.rule)
        return import_state(start, params, pack_state(rule, entries))


def walk(state: Tree, after: int = 0) -> Iterator[tuple[Any, int]]:
    """The parts of a chain, each with how many come after it in its own chain."""
    if type(state) is optax.MaskedState:
        yield from walk(state.inner_state, after)
    elif type(state) is tuple or isinstance(state, Mapping):
        parts = [*state.values()] if isinstance(state, Mapping) else [*state]
        for place, part in enumerate(parts, 1):
            yield from walk(part, len(parts) - place)
    else:
        yield state, after


def alike(chain: list[tuple[Any, int]], name: str | None) -> list[Peer]:
    """The optimizers of which a chain may be, by the one part that keeps something and where it stands.

    name: of the optimizer, if the user gave it: then it may stand anywhere.
    """
    beside = (optax.EmptyState, optax.ScaleByScheduleState)
    keeping = [(type(part), after) for part, after in chain if type(part) not in beside]
    (kind, place), *more = keeping or [(optax.EmptyState, 1)]
    if more and (kind, more[0][0], len(more)) != (optax.FactoredState, optax.EmaState, 1):  # adafactor with momentum
        return []
    return [peer for peer in TABLE if peer.part is kind and (name or peer.after in (None, place))]


def read_entries(chain: list[tuple[Any, int]]) -> dict[str, dict[str, Any]]:
    """What is kept for each parameter, by its name and by our keys."""
    entries: dict[str, dict[str, Any]] = {}
    for part, _ in chain:
        for attribute, key in KEPT.get(type(part), {}).items():
            tree = named(getattr(part, attribute))
            for name, leaf in zip(tree.names, tree.leaves, strict=True):
                entries.setdefault(name, {})[key] = leaf
    return entries


def count_steps(chain: list[tuple[Any, int]]) -> int:
    """How many steps a state was taken, 1 if it does not count them."""
    counts = {int(part.count) for part, _ in chain if "count" in part._fields}
    if len(counts) > 1:
        raise StateError(f"different numbers of steps were taken, {sorted(counts)}: here is one count for all")
    return counts.pop() if counts else 1


def check_meaning(peer: Peer, name: str, rule: Rule) -> None:
    """Refuse options under which the entries of state are something else."""
    for option, value in peer.meaning.items():
        if option not in rule.idle(1.0) and differ(value, now := getattr(rule, option)):
            raise StateError(
                f"{peer.name} stepped {name!r} with what is {option}={value!r} here, and this solver has "
                f"{option}={now!r}: construct it with {option}={value!r}, and with all other options of the run"
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
