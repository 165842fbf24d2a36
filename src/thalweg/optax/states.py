"""What is kept between steps, as optax has it: a NamedTuple of trees like the parameters' own.

Fields are the keys of checkpoints. Where a parameter has no such entry (the rows of a vector, momentum that is off)
its leaf is None.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from thalweg.errors import StateError
from thalweg.optax.trees import Tree, TreeDef
from thalweg.rules import LAMB, LARS, Adafactor, Kron, Muon, Rule
from thalweg.rules.spikes import Spikes
from thalweg.spaces.jax import replicated_with
from thalweg.storage import SPIKES

#: The state of one parameter under its checkpoint keys, as rules have it.
Entries: TypeAlias = dict[str, Any]


class LarsState(NamedTuple):
    #: Steps taken.
    count: Any
    momentum_buffer: Tree
    #: Steps left out by ``on_nonfinite="skip"`` or ``spikes``; None without them.
    skipped: Any = None


class LambState(NamedTuple):
    #: Steps taken.
    count: Any
    #: The average of gradients, and of their squares.
    exp_avg: Tree
    exp_avg_sq: Tree
    #: Steps left out by ``on_nonfinite="skip"`` or ``spikes``; None without them.
    skipped: Any = None


class AdafactorState(NamedTuple):
    #: Steps taken.
    count: Any
    #: Averages of squares along the later and the earlier of two axes, which keep size 1.
    row_var: Tree
    col_var: Tree
    #: All squares, for parameters that are not factored.
    variance: Tree
    #: The average of updates, with momentum.
    exp_avg: Tree
    #: Steps left out by ``on_nonfinite="skip"`` or ``spikes``; None without them.
    skipped: Any = None


class MuonState(NamedTuple):
    #: Steps taken.
    count: Any
    momentum_buffer: Tree
    #: Steps left out by ``on_nonfinite="skip"`` or ``spikes``; None without them.
    skipped: Any = None


class KronState(NamedTuple):
    #: Steps taken.
    count: Any
    momentum_buffer: Tree
    #: A tuple of factors for each parameter, and of their smoothed norms.
    Q: Tree
    L: Tree
    #: How much of the next refresh has come together.
    refresh: Tree
    #: Steps left out by ``on_nonfinite="skip"`` or ``spikes``; None without them.
    skipped: Any = None


class MixtureState(NamedTuple):
    #: The state of each entry's transformation, in their order.
    inner_states: tuple[Any, ...]
    #: Steps left out by ``on_nonfinite="skip"`` or ``spikes``; None without them.
    skipped: Any = None


class SpikedMixtureState(NamedTuple):
    """That of a mixture with ``spikes``."""

    inner_states: tuple[Any, ...]
    skipped: Any
    #: How many spikes there were, and the norms of former steps.
    spikes: Any


#: Rules whose states have a class above.
WRITTEN: dict[type[Rule], type[Any]] = {
    LARS: LarsState,
    LAMB: LambState,
    Adafactor: AdafactorState,
    Muon: MuonState,
    Kron: KronState,
}
#: The classes of states, also those that are made, with the rules they are of.
STATE_CLASSES: dict[type[Any], type[Rule]] = {state_class: rule for rule, state_class in WRITTEN.items()}


def state_class_for(
    rule: type[Rule], keys: tuple[str, ...], beside: tuple[str, ...], *, is_spiked: bool = False
) -> type[Any]:
    """The class of states of a rule that keeps these entries. beside: scales and records that are kept with them.

    is_spiked: whether the norms of former steps are kept.
    """
    written = WRITTEN.get(rule)
    counts = (SPIKES,) if is_spiked else ()
    if written is None:
        return make_state_class(rule, (*keys, *beside), counts)
    usual = fields_of(written)
    # what an option adds to what the rule usually keeps
    more = [key for key in keys if key not in usual and key.rpartition("_")[0] not in SEVERAL]
    return make_state_class(rule, (*usual, *more, *beside), counts) if more or beside or counts else written


@functools.cache
def make_state_class(rule: type[Rule], keys: tuple[str, ...], counts: tuple[str, ...] = ()) -> type[Any]:
    """The class of states of a rule that has none here, with a field for every entry that it keeps.

    counts: fields that are one for all parameters, beside those that every state has.
    """
    name = f"{rule.__name__.replace('+', '_')}State"
    fields: Any = namedtuple(name, ["count", *keys, *counts, "skipped"], defaults=[None])  # type: ignore[misc]

    def reduce(state: Any) -> Any:
        return remade, (rule, keys, tuple(state), counts)

    # a class of its own, so that copies and pickles find it again by its rule
    body = {"__slots__": (), "__reduce__": reduce, "__doc__": f"The state of {rule.__name__}."}
    made = type(fields.__name__, (fields,), body)
    STATE_CLASSES[made] = rule
    return made


def remade(rule: type[Rule], keys: tuple[str, ...], values: tuple[Any, ...], counts: tuple[str, ...] = ()) -> Any:
    return make_state_class(rule, keys, counts)(*values)


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
#: Fields with several arrays for each parameter.
SEVERAL = ("Q", "L")


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
    found: list[Entries] = [{} for _ in range(treedef.num_leaves)]
    for field, column in columns.items():
        for entries, value in zip(found, column, strict=True):
            if field in SEVERAL:  # a tuple, or what a container has made of it
                entries.update({f"{field}_{i}": part for i, part in enumerate(jax.tree.leaves(value))})
            elif value is not None:
                entries[field] = value
    return found


def pack(state_class: type[Any], treedef: TreeDef, states: Sequence[Entries], **counts: Any) -> Any:
    """The reverse of ``unpack``."""
    trees = {
        field: treedef.unflatten([join_field(entries, field) for entries in states]) for field in fields_of(state_class)
    }
    return state_class(**counts, **trees)


def join_field(entries: Entries, field: str) -> Any:
    """One field of one parameter: an array, a tuple of numbered ones, or None."""
    if field not in SEVERAL:
        return entries.get(field)
    return tuple(entries[key] for i in range(len(entries)) if (key := f"{field}_{i}") in entries)
