"""State that comes from another front end, or goes to one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from thalweg.codecs import CODECS, grouping_of, scale_key
from thalweg.errors import StateError
from thalweg.exchange import check_exchanged, entries_of, pack_state, warn_converted
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
    parts, names = own_parts(state), named(params).names
    if twice := [name for name in names if names.count(name) > 1]:
        raise StateError(f"two parameters have the path {twice[0]!r}: paths must differ")
    found: dict[str, Entries] = {}
    rules: dict[str, type[Rule]] = {}
    for rule, part in parts:
        for name, entries in entries_by_name(part, params).items():
            if name in found:
                raise StateError(f"this state has two entries for parameter {name!r}: export the two states one by one")
            beside = {SPIKES: part.spikes} if SPIKES in part._fields else {}
            found[name] = jax.device_get({"step": part.count, **entries, **beside})
            rules[name] = rule
    ordered = {name: found[name] for name in names if name in found}
    made_by = rules if is_mixed(state) else parts[0][0]
    return pack_state(made_by, ordered, iteration=max(int(part.count) for _, part in parts))


def import_state(state: Tree, params: Tree, exported: Mapping[str, Any]) -> Tree:
    """``state`` with its contents replaced by what another front end exported; nothing is changed in place.

    state: of this optimizer, such as ``solver.init(params)``. Arrays keep its dtypes and its layout over devices.
    """
    parts = own_parts(state)
    rules = {name: rule for rule, part in parts for name in entries_by_name(part, params)}
    check_exchanged(exported, [rule for rule, _ in parts] if is_mixed(state) else parts[0][0], rules.get)
    given = entries_of(exported, named(params).names)
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
    mixtures = (MixtureState, SpikedMixtureState)
    parts = jax.tree.leaves(state, is_leaf=lambda part: isinstance(part, mixtures))
    return any(isinstance(part, mixtures) for part in parts) or len({rule for rule, _ in own_parts(state)}) > 1


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
    """The entries of every parameter that a state has, by name and key; a parameter may have none."""
    found: dict[str, Entries] = {}
    for _, name, key, leaf in number_leaves(part, params):
        entries = found.setdefault(name, {})
        if key:
            entries[key] = leaf
    return found


def import_part(part: Any, params: Tree, exported: Mapping[str, Any]) -> Any:
    """One state with new contents, checked."""
    given: dict[str, Entries] = {}
    converted: tuple[Any, ...] = ()
    steps: set[int] = set()
    for name, entries in entries_by_name(part, params).items():
        if name not in exported:
            raise StateError(f"this state has no entry for parameter {name!r}")
        theirs = {key: x for key, x in exported[name].items() if key not in ("step", SPIKES)}
        if theirs.keys() != entries.keys():
            before, theirs = theirs, recode(name, on_device(theirs), entries)
            converted = converted or ((name, before, theirs) if theirs.keys() == entries.keys() else ())
        found, shapes = ({key: tuple(x.shape) for key, x in kept.items()} for kept in (theirs, entries))
        if found != shapes:
            raise StateError(
                f"the state of {name!r} does not fit: the exported entries are {found}, and its options need {shapes}"
            )
        given[name] = on_device(theirs)
        check_codes(space, name, given[name])
        check_eight_bits(space, name, given[name], {key: space.dtype(entry) for key, entry in entries.items()})
        steps.add(int(exported[name]["step"]))
    if len(steps) > 1:
        raise StateError(
            f"parameters have taken different numbers of steps, {sorted(steps)}: thalweg.optax keeps one count for all "
            "parameters, so they must be equal"
        )
    if converted:
        warn_converted(*converted)
    norms = [entries[SPIKES] for entries in exported.values() if SPIKES in entries]
    if SPIKES in part._fields and norms:
        part = part._replace(spikes=place_like(norms[0], part.spikes))
    fields: dict[str, list[Any]] = {field: [] for field in fields_of(part)}
    for field, name, key, leaf in number_leaves(part, params):
        if key:
            fields[field].append(place_like(given[name][key], leaf))
    trees = {
        field: jax.tree.unflatten(jax.tree.structure(getattr(part, field)), leaves) for field, leaves in fields.items()
    }
    return part._replace(count=place_like(steps.pop(), part.count) if steps else part.count, **trees)


def on_device(entries: Mapping[str, Any]) -> Entries:
    return {key: jnp.asarray(entry) for key, entry in entries.items()}


def recode(name: str, found: Entries, like: Entries) -> Entries:
    """State as another is kept: in codes or not, with a record or not. Scales tell how codes are grouped."""
    check_codes(space, name, found)
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
