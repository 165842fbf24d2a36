"""State that comes from another front end, or goes to one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from thalweg.codecs import CODECS, grouping_of, scale_key
from thalweg.errors import StateError
from thalweg.exchange import by_known_name, check_exchanged, check_mixture, pack_state, warn_converted
from thalweg.optax.states import SEVERAL, STATE_CLASSES, Entries, MixtureState, SpikedMixtureState, fields_of
from thalweg.optax.trees import Tree, dotted, named
from thalweg.rules import Rule
from thalweg.spaces import jax as space
from thalweg.storage import RECORD, SPIKES, check_codes, check_eight_bits, coded_keys, declared


def export_state(state: Tree, params: Tree) -> dict[str, Any]:
    """The state of an optimizer for another front end, or for a file.

    ``thalweg.numpy``'s ``load_state_dict`` and ``thalweg.torch.import_state`` take it. Wrappers of optax around the
    optimizer are passed over: what they keep themselves is not exported.
    """
    parts = own_parts(state)
    names = named(params).names
    if len(set(names)) < len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise StateError(f"two parameters have the path {twice!r}: paths must differ")
    found: dict[str, Entries] = {}
    rules: dict[str, type[Rule]] = {}
    for rule, part in parts:
        for name, entries in entries_by_name(part, params).items():
            if name in found:
                raise StateError(f"this state has two entries for parameter {name!r}: export the two states one by one")
            beside = {SPIKES: jax.device_get(part.spikes)} if SPIKES in part._fields else {}
            found[name] = {"step": jax.device_get(part.count), **jax.device_get(entries), **beside}
            rules[name] = rule
    ordered = {name: found[name] for name in names if name in found}
    made_by = rules if is_mixed(state) else parts[0][0]
    return pack_state(made_by, ordered, iteration=max(int(part.count) for _, part in parts))


def import_state(state: Tree, params: Tree, exported: Mapping[str, Any]) -> Tree:
    """``state`` with its contents replaced by what another front end exported; nothing is changed in place.

    state: of this optimizer, such as ``solver.init(params)``. Arrays keep its dtypes and its layout over devices.
    """
    parts = own_parts(state)
    if is_mixed(state):
        rules = {name: rule for rule, part in parts for name in entries_by_name(part, params)}
        check_mixture(exported, [rule for rule, _ in parts], rules.get)
    else:
        check_exchanged(exported, parts[0][0])
    given = by_known_name(exported, named(params).names)
    return jax.tree.map(lambda part: import_part(part, params, given) if is_own(part) else part, state, is_leaf=is_own)


def is_own(part: Any) -> bool:
    return type(part) in STATE_CLASSES


def own_parts(state: Tree) -> list[tuple[type[Rule], Any]]:
    """The states of thalweg.optax within a state, with the rules they are of."""
    parts = [part for part in jax.tree.leaves(state, is_leaf=is_own) if is_own(part)]
    if not parts:
        raise StateError("this must be the state of an optimizer of thalweg.optax, and it has none")
    return [(STATE_CLASSES[type(part)], part) for part in parts]


def is_mixed(state: Tree) -> bool:
    """Whether a state is one of a mixture, or of several rules that optax has put together."""
    parts = jax.tree.leaves(state, is_leaf=lambda part: isinstance(part, (MixtureState, SpikedMixtureState)))
    mixed = any(isinstance(part, (MixtureState, SpikedMixtureState)) for part in parts)
    return mixed or len({rule for rule, _ in own_parts(state)}) > 1


def number_leaves(part: Any, params: Tree) -> Iterator[tuple[str, str, str, Any]]:
    """(field, parameter, key, leaf) of every array of a state, and one without key for every parameter."""
    found = named(params)
    names = dict(zip(found.paths, found.names, strict=True))
    for index, field in enumerate(fields_of(part)):
        flat, _ = jax.tree_util.tree_flatten_with_path(getattr(part, field), is_leaf=lambda x: x is None)
        for path, leaf in flat:
            inner = path[:-1] if field in SEVERAL else path
            if leaf is not None and inner not in names:
                raise StateError(f"this state has a parameter {dotted(inner)!r} that params does not have")
            if index == 0 and inner in names:
                yield field, names[inner], "", None
            if leaf is not None:
                yield field, names[inner], f"{field}_{dotted(path[-1:])}" if field in SEVERAL else field, leaf


def entries_by_name(part: Any, params: Tree) -> dict[str, Entries]:
    """State by parameter and key; nothing for parameters of which nothing is kept."""
    found: dict[str, Entries] = {}
    for _, name, key, leaf in number_leaves(part, params):
        entries = found.setdefault(name, {})
        if key:
            entries[key] = leaf
    return found


def import_part(part: Any, params: Tree, given: Mapping[str, Any]) -> Any:
    """One state with new contents, checked."""
    present, told = entries_by_name(part, params), False
    norms = [entries[SPIKES] for entries in given.values() if SPIKES in entries]
    given = {name: {key: x for key, x in own.items() if key != SPIKES} for name, own in given.items()}
    if SPIKES in part._fields and norms:
        part = part._replace(spikes=place_like(norms[0], part.spikes))
    for name, entries in present.items():
        if name not in given:
            raise StateError(f"this state has no entry for parameter {name!r}")
        check_codes(space, name, on_device(given[name]))
        if given[name].keys() - {"step"} != entries.keys():
            own = recode(on_device(given[name]), entries)
            if not told and own.keys() == entries.keys():
                told = True
                warn_converted(name, given[name].keys() - {"step"}, own)
            given = {**given, name: {"step": given[name]["step"], **own}}
        shapes = {key: tuple(entry.shape) for key, entry in entries.items()}
        found = {key: tuple(entry.shape) for key, entry in given[name].items() if key != "step"}
        if found != shapes:
            raise StateError(
                f"the state of {name!r} does not fit: the exported entries are {found}, and its options need {shapes}"
            )
        check_eight_bits(
            space, name, on_device(given[name]), {key: space.dtype(entry) for key, entry in entries.items()}
        )
    steps = {int(given[name]["step"]) for name in present}
    if len(steps) > 1:
        raise StateError(
            f"parameters have taken different numbers of steps, {sorted(steps)}: thalweg.optax keeps one count for all "
            "parameters, so they must be equal"
        )
    fields: dict[str, list[Any]] = {field: [] for field in fields_of(part)}
    for field, name, key, leaf in number_leaves(part, params):
        if key:
            fields[field].append(place_like(given[name][key], leaf))
    trees = {
        field: jax.tree.unflatten(jax.tree.structure(getattr(part, field)), leaves) for field, leaves in fields.items()
    }
    return part._replace(count=place_like(steps.pop() if steps else part.count, part.count), **trees)


def on_device(entries: Mapping[str, Any]) -> Entries:
    return {key: jnp.asarray(entry) for key, entry in entries.items() if key != "step"}


def recode(found: Entries, like: Entries) -> Entries:
    """State as another is kept: in codes or not, with a record or not. Scales tell how codes are grouped."""
    state = declared(space, found)
    for key in coded_keys(space, found):
        scales = found[scale_key(key)]
        codec, groups = CODECS[found[key].dtype.name], grouping_of(found[key].shape, scales.shape)
        state[key] = codec.decode(space, found[key], scales, groups)
    for key in coded_keys(space, like):
        if key in state and state[key].shape == like[key].shape:
            groups = grouping_of(like[key].shape, like[scale_key(key)].shape)
            state[key], state[scale_key(key)] = CODECS[like[key].dtype.name].encode(space, state[key], groups)
    if RECORD in like:
        state[RECORD] = found.get(RECORD, jnp.zeros_like(like[RECORD]))
    return state


def place_like(value: Any, like: Any) -> Any:
    """A value in the dtype and on the devices of another."""
    array = jnp.asarray(value, like.dtype)
    return jax.device_put(array, like.sharding) if getattr(like, "committed", False) else array
