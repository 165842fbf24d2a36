"""What is kept between steps, as optax has it: a NamedTuple of trees like the parameters' own.

Fields are the keys of checkpoints. Where a parameter has no such entry (the rows of a vector, momentum that is off)
its leaf is None. ``count`` is of the steps taken, and ``skipped`` of those that were left out by
``on_nonfinite="skip"`` or ``spikes``; it is None without them.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from thalweg.errors import StateError
from thalweg.optax.trees import Tree, TreeDef, dotted, named
from thalweg.rules import LAMB, LARS, Adafactor, Kron, Muon, Rule
from thalweg.rules.spikes import Spikes
from thalweg.spaces.jax import replicated_with
from thalweg.storage import SPIKES

#: The state of one parameter under its checkpoint keys, as rules have it.
Entries: TypeAlias = dict[str, Any]


class MixtureState(NamedTuple):
    #: The state of each entry's transformation, in their order.
    inner_states: tuple[Any, ...]
    skipped: Any = None


class SpikedMixtureState(NamedTuple):
    """The state of a mixture with ``spikes``."""

    inner_states: tuple[Any, ...]
    skipped: Any
    #: How many spikes there were, and the norms of former steps.
    spikes: Any


class StatsState(NamedTuple):
    #: The state of the transformation itself.
    inner_state: Any
    #: Figures of the last step, by parameter and name; zeros before the first.
    stats: dict[str, dict[str, Any]]


#: The fields that states of a rule have whatever its options are, beside those of every state.
USUAL: Mapping[type[Rule], tuple[str, ...]] = {
    LARS: ("momentum_buffer",),
    LAMB: ("exp_avg", "exp_avg_sq"),
    # averages of squares along two axes, all squares where it is not factored, the average of updates
    Adafactor: ("row_var", "col_var", "variance", "exp_avg"),
    Muon: ("momentum_buffer",),
    # a tuple of factors for each parameter, and of their norms; how much of the next refresh has come together
    Kron: ("momentum_buffer", "Q", "L", "refresh"),
}
#: Fields with several arrays for each parameter.
SEVERAL = ("Q", "L")
#: The classes of states that were made, with the rules they are of.
STATE_CLASSES: dict[type[Any], type[Rule]] = {}


def state_class_for(
    rule: type[Rule], keys: tuple[str, ...] = (), beside: tuple[str, ...] = (), *, is_spiked: bool = False
) -> type[Any]:
    """The class of states of a rule that keeps these entries. beside: scales and records that are kept with them.

    is_spiked: whether it has the norms of former steps.
    """
    usual = USUAL.get(rule, ())
    joined = {*usual} & {*SEVERAL}
    more = [key for key in keys if key not in usual and key.rpartition("_")[0] not in joined]
    return make_state_class(rule, (*usual, *more, *beside), (SPIKES,) if is_spiked else ())


@functools.cache
def make_state_class(rule: type[Rule], keys: tuple[str, ...], counts: tuple[str, ...]) -> type[Any]:
    """The class of states of a rule with a field for every entry that it keeps.

    counts: fields that are one for all parameters, beside those that every state has.
    """
    shown = rule.__name__.capitalize() if rule.__name__.isupper() else rule.__name__.replace("+", "_")
    name = f"{shown}State"
    fields: Any = namedtuple(name, ["count", *keys, *counts, "skipped"], defaults=[None])  # type: ignore[misc]

    def reduce(state: Any) -> Any:
        return remade, (rule, keys, tuple(state), counts)

    # a class of its own, so that copies and pickles find it again by its rule
    body = {"__slots__": (), "__reduce__": reduce, "__doc__": f"The state of {rule.__name__}."}
    state_class = type(fields.__name__, (fields,), body)
    STATE_CLASSES[state_class] = rule
    return state_class


def remade(rule: type[Rule], keys: tuple[str, ...], values: tuple[Any, ...], counts: tuple[str, ...] = ()) -> Any:
    return make_state_class(rule, keys, counts)(*values)


LarsState, LambState, AdafactorState, MuonState, KronState = map(state_class_for, USUAL)


def first_count(leaves: Sequence[Any]) -> Any:
    """A count of steps before the first, where parameters are: one that moves there is compiled for twice."""
    return jnp.zeros([], jnp.int32, device=replicated_with(leaves[0]) if leaves else None)


def first_norms(spikes: Spikes, leaves: Sequence[Any]) -> Any:
    """What is kept of norms before the first step."""
    is_wide = any(leaf.dtype == jnp.float64 for leaf in leaves)
    place = replicated_with(leaves[0]) if leaves else None
    return jnp.zeros(spikes.kept_shape, jnp.float64 if is_wide else jnp.float32, device=place)


#: Fields that are one for all parameters.
COUNTS = ("count", "skipped", SPIKES)


def fields_of(state_class: Any) -> list[str]:
    return [field for field in state_class._fields if field not in COUNTS]


def unpack(state_class: type[Any], state: Any, treedef: TreeDef) -> list[Entries]:
    """The state of each parameter, in the order of the tree's leaves."""
    if not isinstance(state, state_class):
        raise StateError(
            f"this is not a state of this optimizer: expected {state_class.__name__}, got {type(state).__name__}"
        )
    try:
        columns = {field: treedef.flatten_up_to(getattr(state, field)) for field in fields_of(state_class)}
    except (ValueError, TypeError, KeyError) as error:
        raise StateError(f"this state was made for parameters of another structure: {error}") from None
    unpacked: list[Entries] = [{} for _ in range(treedef.num_leaves)]
    for field, column in columns.items():
        for entries, value in zip(unpacked, column, strict=True):
            if field in SEVERAL:  # a tuple, or what a container has made of it
                entries.update({f"{field}_{i}": part for i, part in enumerate(jax.tree.leaves(value))})
            elif value is not None:
                entries[field] = value
    return unpacked


def pack(state_class: type[Any], treedef: TreeDef, states: Sequence[Entries], **counts: Any) -> Any:
    """The reverse of ``unpack``."""
    trees = {
        field: treedef.unflatten([join_field(entries, field) for entries in states]) for field in fields_of(state_class)
    }
    return state_class(**counts, **trees)


def is_own(part: Any) -> bool:
    return type(part) in STATE_CLASSES


def own_parts(state: Tree, params: Tree) -> list[tuple[type[Rule], Any, dict[str, Entries]]]:
    """The states of thalweg.optax within a state: the rule, the state, and its entries by parameter and key."""
    parts = [part for part in jax.tree.leaves(state, is_leaf=is_own) if is_own(part)]
    if not parts:
        raise StateError("this must be the state of an optimizer of thalweg.optax, and it has none")
    described, others = [], named(params).names
    for part in sorted(parts, key=lambda part: not fields_of(part)):  # rules that keep nothing have what is left
        entries = by_name(part, params) if fields_of(part) else dict[str, Entries]((name, {}) for name in others)
        described.append((STATE_CLASSES[type(part)], part, entries))
        others = [name for name in others if name not in entries]
    return described


def locate(part: Any, params: Tree) -> tuple[list[str | None], TreeDef]:
    """The names of the parameters that a state is of, and their tree. Where params has None, there is no name."""
    flat = named(params)
    if twice := [name for name in flat.names if flat.names.count(name) > 1]:
        raise StateError(f"two parameters have the path {twice[0]!r}: paths must differ")
    names = dict(zip(flat.paths, flat.names, strict=True))
    one_of_each = next((getattr(part, field) for field in fields_of(part) if field not in SEVERAL), ())
    leaves, treedef = jax.tree_util.tree_flatten_with_path(one_of_each, is_leaf=lambda x: x is None)
    if unknown := [path for path, leaf in leaves if path not in names and leaf is not None]:
        raise StateError(f"this state has a parameter {dotted(unknown[0])!r} that params does not have")
    return [names.get(path) for path, _ in leaves], treedef


def by_name(part: Any, params: Tree) -> dict[str, Entries]:
    """The entries of every parameter that a state is of, by name and key; a parameter may have none."""
    names, treedef = locate(part, params)
    states = unpack(type(part), part, treedef)
    return {name: entries for name, entries in zip(names, states, strict=True) if name is not None}


def replace_entries(part: Any, params: Tree, states: Mapping[str, Entries], counts: Mapping[str, Any]) -> Any:
    """A state with other entries. counts: new values of what is one for all parameters."""
    names, treedef = locate(part, params)
    before = {field: getattr(part, field) for field in part._fields if field in COUNTS}
    ordered = [{} if name is None else states.get(name, {}) for name in names]
    return pack(type(part), treedef, ordered, **{**before, **counts})


def join_field(entries: Entries, field: str) -> Any:
    """One field of one parameter: an array, a tuple of numbered ones, or None."""
    if field not in SEVERAL:
        return entries.get(field)
    return tuple(entries[key] for i in range(len(entries)) if (key := f"{field}_{i}") in entries)
