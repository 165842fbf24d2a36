"""State that comes from another front end, or goes to one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from thalweg.errors import StateError
from thalweg.exchange import by_known_name, check_exchanged, exchanged
from thalweg.optax.states import SEVERAL, STATES, Entries, fields_of
from thalweg.optax.trees import Tree, dotted, named


def export_state(state: Tree, params: Tree) -> dict[str, Any]:
    """The state of an optimizer for another front end, or for a file.

    ``thalweg.numpy``'s ``load_state_dict`` and ``thalweg.torch.import_state`` take it. Wrappers of optax around the
    optimizer are passed over: what they keep themselves is not exported.
    """
    kind, parts = own_parts(state)
    names = named(params).names
    if len(set(names)) < len(names):
        raise StateError(f"two parameters have the path {next(n for n in names if names.count(n) > 1)!r}")
    found: dict[str, Entries] = {}
    for part in parts:
        for name, entries in entries_by_name(part).items():
            found[name] = {"step": jax.device_get(part.count), **jax.device_get(entries)}
    if not found:  # a rule that keeps nothing
        found = {name: {"step": jax.device_get(parts[0].count)} for name in names}
    return exchanged(kind, {name: found[name] for name in names if name in found})


def import_state(state: Tree, params: Tree, exported: Mapping[str, Any]) -> Tree:
    """``state`` with its contents replaced by what another front end exported; nothing is changed in place.

    state: of this optimizer, such as ``solver.init(params)``. Arrays keep its dtypes and its layout over devices.
    """
    check_exchanged(exported, own_parts(state)[0])
    known = named(params).names
    given = by_known_name(exported, known)
    kinds = tuple(STATES.values())
    return jax.tree.map(
        lambda part: imported(part, given, known) if isinstance(part, kinds) else part,
        state,
        is_leaf=lambda part: isinstance(part, kinds),
    )


def own_parts(state: Tree) -> tuple[str, list[Any]]:
    """The states of ours within a state, and the rule they are of."""
    kinds = {kind: name for name, kind in STATES.items()}
    parts = [part for part in jax.tree.leaves(state, is_leaf=lambda part: type(part) in kinds) if type(part) in kinds]
    if len({type(part) for part in parts}) != 1:
        raise StateError(f"there must be the state of one optimizer of thalweg.optax here, found {len(parts)}")
    return kinds[type(parts[0])], parts


def numbered(part: Any) -> Iterator[tuple[str, str, str, Any]]:
    """(field, parameter, key, leaf) of every array of a state."""
    for field in fields_of(part):
        tuples = field in SEVERAL
        for path, leaf in jax.tree_util.tree_flatten_with_path(getattr(part, field))[0]:
            inner, last = (path[:-1], dotted(path[-1:])) if tuples else (path, "")
            yield field, dotted(inner), f"{field}_{last}" if tuples else field, leaf


def entries_by_name(part: Any) -> dict[str, Entries]:
    found: dict[str, Entries] = {}
    for _, name, key, leaf in numbered(part):
        found.setdefault(name, {})[key] = leaf
    return found


def imported(part: Any, given: Mapping[str, Any], known: list[str]) -> Any:
    """One state with new contents, checked."""
    present = entries_by_name(part)
    names = list(present) or known
    for name in names:
        if name not in given:
            raise StateError(f"this state has nothing about parameter {name!r}")
        shapes = {key: tuple(entry.shape) for key, entry in present.get(name, {}).items()}
        found = {key: tuple(entry.shape) for key, entry in given[name].items() if key != "step"}
        if found != shapes:
            raise StateError(f"the state of {name!r} does not fit: exported is {found}, and its options make {shapes}")
    steps = {int(given[name]["step"]) for name in names}
    if len(steps) > 1:
        raise StateError(
            f"parameters have taken different numbers of steps, {sorted(steps)}, and one count serves all of them here"
        )
    fields: dict[str, list[Any]] = {field: [] for field in fields_of(part)}
    for field, name, key, leaf in numbered(part):
        fields[field].append(placed(given[name][key], leaf))
    trees = {
        field: jax.tree.unflatten(jax.tree.structure(getattr(part, field)), leaves) for field, leaves in fields.items()
    }
    return part._replace(count=placed(steps.pop() if steps else part.count, part.count), **trees)


def placed(value: Any, like: Any) -> Any:
    """A value in the dtype and on the devices of another."""
    array = jnp.asarray(value, like.dtype)
    return jax.device_put(array, like.sharding) if getattr(like, "committed", False) else array
