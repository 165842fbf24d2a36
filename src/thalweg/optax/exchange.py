"""State that comes from another front end, or goes to one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from thalweg.errors import StateError, read_as
from thalweg.exchange import pack_state, read_state
from thalweg.optax.states import Entries, is_own, own_parts, replace_entries
from thalweg.optax.trees import Tree
from thalweg.rules import Rule
from thalweg.spaces import jax as space
from thalweg.storage import SPIKES, check_saved


def export_state(state: Tree, params: Tree) -> dict[str, Any]:
    """The state of an optimizer for another front end, or for a file.

    ``thalweg.numpy``'s ``load_state_dict`` and ``thalweg.torch.import_state`` take it. Wrappers of optax around the
    optimizer are passed over: what they keep themselves is not exported.
    """
    states: dict[str, Entries] = {}
    rules: dict[str, type[Rule]] = {}
    for rule, part, by_name in own_parts(state, params):
        beside = {"step": part.count, **({SPIKES: part.spikes} if SPIKES in part._fields else {})}
        for name, entries in by_name.items():
            if name in states:
                raise StateError(f"this state has two entries for parameter {name!r}: export the two states one by one")
            states[name], rules[name] = jax.device_get({**beside, **entries}), rule
    return pack_state(rules, states)


@read_as("this state")
def import_state(state: Tree, params: Tree, exported: Mapping[str, Any]) -> Tree:
    """``state`` with its contents replaced by what another front end exported; nothing is changed in place.

    state: of this optimizer, such as ``solver.init(params)``. Arrays keep its dtypes and its layout over devices.
    """
    parts = own_parts(state, params)
    saved = read_state(exported, {name: rule for rule, _, old in parts for name in old})
    new = {id(part): import_part(part, old, params, saved) for _, part, old in parts}
    return jax.tree.map(lambda part: new.get(id(part), part), state, is_leaf=is_own)


def import_part(part: Any, old: Mapping[str, Entries], params: Tree, saved: Mapping[str, Mapping[str, Any]]) -> Any:
    """One state with new contents, checked as every state that is loaded. old: what it has."""
    states: dict[str, Entries] = {}
    for name, like in old.items():
        if name not in saved:
            raise StateError(f"this state has no entry for parameter {name!r}")
        entries = {key: entry for key, entry in saved[name].items() if key not in ("step", SPIKES)}
        check_saved(space, name, entries, like)
        states[name] = entries
    steps = {int(saved[name]["step"]) for name in states}
    if len(steps) > 1:
        raise StateError(
            f"parameters have taken different numbers of steps, {sorted(steps)}: thalweg.optax keeps one count for all "
            "parameters, so they must be equal"
        )
    counts = {"count": steps.pop() if steps else part.count}
    norms = [saved[name][SPIKES] for name in states if SPIKES in saved[name]]
    if norms and SPIKES in part._fields:
        counts[SPIKES] = norms[0]
    return jax.tree.map(place_like, replace_entries(part, params, states, counts), part)


def place_like(value: Any, like: Any) -> Any:
    """A value in the dtype and on the devices of another."""
    array = jnp.asarray(value, like.dtype)
    return jax.device_put(array, like.sharding) if getattr(like, "committed", False) else array
