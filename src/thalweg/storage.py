"""What is kept for a parameter between steps: under which keys, in which shapes and dtypes, as numbers or as codes.

Beside the entries that a rule declares there may be scales, for entries in eight bits, and a record of what rounding
has cost the parameter. All who read or write state ask here; rules know nothing of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from thalweg.arrays import A, Shape, Space, State, Truth
from thalweg.codecs import CODECS, Grouping, grouping, grouping_of, scale_key
from thalweg.dtypes import DTYPES, NARROW
from thalweg.errors import ResumeWarning, StateError, warn
from thalweg.rules import Rule
from thalweg.rules.around import keys_around
from thalweg.rules.entries import Entry, Spread
from thalweg.rules.spikes import Spikes
from thalweg.settings import Numerics

#: The key of what rounding has cost a parameter of 16 bits, in 256ths of the distance to its neighbours.
RECORD = "rounding_error"
#: The key of norms of former steps, which an optimizer keeps with the state of a parameter and no rule sees.
SPIKES = "spikes"
#: The key of weights that an average has taken the place of, in the state of their parameter until they are put back.
WEIGHTS = "weights"
#: Something that is kept for a parameter: its shape and its dtype.
Kept: TypeAlias = tuple[Shape, str]


# ---- what is kept


def arithmetic(dtype: str) -> str:
    """The precision in which parameters of this dtype are computed."""
    return "float64" if dtype == "float64" else "float32"


def groups_of(entry: Entry, shape: Shape, stacked_axes: int, numerics: Numerics) -> Grouping | None:
    """How an entry is grouped for its codec; None: it is kept in floating point."""
    fits = isinstance(entry, Spread) and not entry.over and numerics.stored(entry) in CODECS
    return grouping(shape, stacked_axes) if fits else None


def storage(entry: Entry, dtype: str, numerics: Numerics, groups: Grouping | None = None) -> str:
    """The dtype in which a state entry is kept, for a parameter of this dtype. groups: those of its codes, if any."""
    stored = numerics.stored(entry)
    return arithmetic(dtype) if stored is None or (stored in CODECS and groups is None) else stored


def is_compensated(numerics: Numerics, dtype: str) -> bool:
    """Whether a record is kept of what rounding costs parameters of this dtype."""
    return numerics.rounding == "compensated" and dtype in NARROW


def describe_state(
    rule: Rule, numerics: Numerics, shape: Shape, dtype: str, held: Shape | None = None
) -> dict[str, Kept]:
    """Shape and dtype of all that is kept for a parameter: entries that its rule declares, and what goes with them.

    held: the shape of a shard, for which less is kept of what is laid out like the parameter.
    """
    described: dict[str, Kept] = {}
    for key, entry in rule.entries(shape).items():
        held_shape = shape if held is None or not isinstance(entry, Spread) else held
        groups = groups_of(entry, shape, rule.stacked_axes, numerics)
        described[key] = entry.shape(held_shape, rule.stacked_axes), storage(entry, dtype, numerics, groups)
        if groups is not None:
            described[scale_key(key)] = groups.scales(held_shape), "float32"
    if is_compensated(numerics, dtype):
        described[RECORD] = held or shape, "int8"
    return described


def keys_like_parameter(rule: Rule, shape: Shape, keys: Iterable[str]) -> list[str]:
    """The keys of a state whose arrays are as large as the parameter, or go with such arrays."""
    large = [key for key, entry in rule.entries(shape).items() if isinstance(entry, Spread) and not entry.over]
    concerned = (RECORD, *large, *map(scale_key, large))
    return [key for key in keys if key in concerned]


def coded_groups(rule: Rule, numerics: Numerics, shape: Shape) -> Grouping | None:
    """How the codes of a parameter's state are grouped; None: it has none."""
    groups = (groups_of(entry, shape, rule.stacked_axes, numerics) for entry in rule.entries(shape).values())
    return next(filter(None, groups), None)


def first_state(xp: Space[A], rule: Rule, numerics: Numerics, p: A) -> State[A]:
    """The state of a parameter before its first step, as it is stored."""
    shape, dtype = xp.shape(p), xp.dtype(p)
    state: State[A] = {}
    for key, entry in rule.entries(shape).items():
        groups = groups_of(entry, shape, rule.stacked_axes, numerics)
        is_zero = type(entry).first is Spread.first
        if is_zero and groups is not None:
            codec = CODECS[storage(entry, dtype, numerics, groups)]
            state[key], state[scale_key(key)] = codec.zeros(xp, p, groups)
        else:
            # zeros are made in the parameter's own dtype, without a copy of it in the precision of arithmetic
            like = p if is_zero else xp.astype(p, arithmetic(dtype))
            state.update(encoded(xp, rule, numerics, p, {key: entry.first(xp, like, rule.stacked_axes)}))
    return {**state, **first_record(xp, numerics, p)}


# ---- numbers and codes


def coded_keys(xp: Space[A], s: State[A]) -> list[str]:
    """The keys of entries that are kept as codes, each with scales beside it."""
    return [key for key, entry in s.items() if xp.dtype(entry) in CODECS and key != RECORD]


def declared(xp: Space[A], s: State[A]) -> State[A]:
    """The entries of a state that its rule has declared, as they are kept: without scales and records."""
    beside = (RECORD, *map(scale_key, coded_keys(xp, s)))
    return {key: entry for key, entry in s.items() if key not in beside}


def decoded(xp: Space[A], rule: Rule, p: A, s: State[A]) -> State[A]:
    """The entries of a state that its rule has declared, in floating point."""
    state, groups = declared(xp, s), grouping(xp.shape(p), rule.stacked_axes)
    for key in coded_keys(xp, s):
        assert groups is not None
        state[key] = CODECS[xp.dtype(s[key])].decode(xp, s[key], s[scale_key(key)], groups)
    return state


def encoded(xp: Space[A], rule: Rule, numerics: Numerics, p: A, state: State[A]) -> State[A]:
    """State in floating point as these options keep it, rounded to the nearest."""
    shape, dtype, arrays = xp.shape(p), xp.dtype(p), {}
    entries = rule.entries(shape)
    for key, value in state.items():
        groups = groups_of(entries[key], shape, rule.stacked_axes, numerics)
        as_kept = storage(entries[key], dtype, numerics, groups)
        if groups is not None:
            arrays[key], arrays[scale_key(key)] = CODECS[as_kept].encode(xp, value, groups)
        else:
            arrays[key] = xp.astype(value, as_kept)
    return arrays


def first_record(xp: Space[A], numerics: Numerics, p: A) -> State[A]:
    """The record of what rounding has cost a parameter before its first step, if one is kept."""
    return {RECORD: xp.astype(xp.zeros_like(p), "int8")} if is_compensated(numerics, xp.dtype(p)) else {}


def converted(xp: Space[A], rule: Rule, numerics: Numerics, p: A, s: State[A]) -> State[A]:
    """A state, however it was kept, as these options keep it."""
    new = {**encoded(xp, rule, numerics, p, decoded(xp, rule, p, s)), **first_record(xp, numerics, p)}
    same = {key: s[key] for key in new if key in s and xp.dtype(s[key]) == xp.dtype(new[key])}
    return {key: same.get(key, new[key]) for key in new}


def describe_conversion(name: object, before: Iterable[str], now: Iterable[str]) -> str:
    """What to tell of state that is kept otherwise than it was. before, now: its keys then and now."""
    lost = ", ".join(sorted(set(before) - set(now))) or "nothing else"
    added = ", ".join(sorted(set(now) - set(before))) or "nothing else"
    return (
        "state was kept otherwise than state_dtype, momentum_dtype and rounding have it now, and was converted: that "
        f"of {name!r} now has {added} and has no longer {lost}"
    )


# ---- saved state


def check_layout(layout: Any, newest: int) -> None:
    if not isinstance(layout, int) or layout < 1:
        raise StateError(f"the layout of a saved state must be a whole number from 1, got {layout!r}")
    if layout > newest:
        raise StateError(f"this state has layout {layout}, and this version reads up to {newest}: update thalweg")


def check_version(rule: type[Rule], version: Any) -> None:
    """Refuse a state of another version of a rule. None: it does not say, as those of thalweg 0.1.0; these are of 1."""
    saved = 1 if version is None else version
    if not isinstance(saved, int) or saved != rule.version:
        raise StateError(
            f"this is a state of version {saved} of {rule.__name__} and cannot be loaded into version {rule.version}: "
            "load it with the rule that made it, or convert it and set its version"
        )


def read_count(what: str, value: Any) -> int:
    """A count that Python or an array library has; raise if it is none."""
    number = value.item() if getattr(value, "shape", None) == () else value
    is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
    if not is_number or not 0 <= number < 2**31 or number != int(number):
        raise StateError(f"{what} must be a whole number >= 0, got {value!r:.80}")
    return int(number)


def completed(xp: Space[A], name: object, rule: Rule, numerics: Numerics, p: A, s: State[A]) -> State[A]:
    """A saved state with first entries for what was put around the rule since, which begins with this step."""
    new = sorted(keys_around(rule, xp.shape(p)) - s.keys())
    if not new:
        return s
    message = f"{', '.join(map(repr, new))} of {name!r} is new and begins with this step; and so for all others alike"
    warn(message, ResumeWarning)
    first = first_state(xp, rule, numerics, p)
    return {**s, **{key: first[key] for key in new}}


def check_fits(xp: Space[A], name: object, rule: Rule, shape: Shape, s: State[A]) -> None:
    """Refuse a state that is not the one of a rule for a parameter of this shape, in whatever dtypes it is kept."""
    groups, entries = grouping(shape, rule.stacked_axes), rule.entries(shape)
    wanted = {key: entry.shape(shape, rule.stacked_axes) for key, entry in entries.items()}
    wanted |= {scale_key(key): groups.scales(shape) if groups else () for key in coded_keys(xp, s)}
    wanted |= {RECORD: shape} if RECORD in s else {}
    check_shapes(name, {key: xp.shape(entry) for key, entry in s.items()}, wanted)
    codes: dict[str, str | None] = {key: entries[key].eight_bits for key in coded_keys(xp, s)}
    check_eight_bits(xp, name, s, {**codes, RECORD: "int8"} if RECORD in s else codes)


def check_saved(
    xp: Space[A], name: object, s: State[A], like: Mapping[str, A], whole: Callable[[A], A] = lambda x: x
) -> None:
    """Refuse a saved state that is not kept as another is, in whatever dtypes of floating point.

    whole: makes one of a tensor that is sharded.
    """
    check_shapes(name, *({key: xp.shape(entry) for key, entry in entries.items()} for entries in (s, like)))
    check_eight_bits(xp, name, s, {key: xp.dtype(entry) for key, entry in like.items()})
    check_codes(xp, name, s, whole)


def check_shapes(name: object, shapes: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> None:
    """Refuse a state that has other entries than its options need."""
    if shapes != wanted:
        raise StateError(
            f"the state of {name!r} does not fit its options: they need {wanted}, and the state has {shapes}; restore "
            "the options that it was made with, state_dtype and rounding too, or drop it: clear_state(), in JAX init()"
        )


def check_norms(spikes: Spikes, shape: Shape) -> None:
    """Refuse norms that are kept of another window. shape: of what is kept."""
    if shape != spikes.kept_shape:
        raise StateError(
            f"spikes has window={spikes.window}, and the norms of {math.prod(shape) - 1} steps are kept: use that "
            "window, or drop them: clear_state(), in JAX init()"
        )


def check_codes(xp: Space[A], name: object, s: State[A], whole: Callable[[A], A] = lambda x: x) -> None:
    """Refuse what are no numbers, codes without scales, and scales that are damaged. whole: as for ``check_saved``."""
    for key, entry in s.items():
        if xp.dtype(entry) not in (*DTYPES, *CODECS):
            raise StateError(f"the state of {name!r} must be arrays of floating point: {key!r} is {xp.dtype(entry)}")
    for key in coded_keys(xp, s):
        if scale_key(key) not in s:
            raise StateError(f"the state of {name!r} is damaged: {key!r} has codes, and there is no {scale_key(key)!r}")
        scales = whole(s[scale_key(key)])
        scales_shape, shape = xp.shape(scales), xp.shape(s[key])
        lead = len(scales_shape) - 1
        cut = lead < 0 or scales_shape[:lead] != shape[:lead] or math.prod(shape[lead:]) % max(1, scales_shape[lead])
        if cut or xp.dtype(scales) != "float32":
            raise StateError(
                f"the state of {name!r} is damaged: {scale_key(key)!r} must be float32 with a number for each group of "
                f"{key!r}, which has shape {shape}; it is {xp.dtype(scales)} of shape {scales_shape}"
            )
        least = -xp.amax(-scales, None)
        if not all_finite(xp, scales) or least < 0:
            raise StateError(f"the state of {name!r} is damaged: {scale_key(key)!r} must be finite and not negative")
        if least == 0:
            largest = xp.peaks(xp.astype(whole(s[key]), "float32"), *grouping_of(shape, scales_shape))
            if xp.amax(xp.where(scales > 0.0, 0.0, largest), None) > 0:
                raise StateError(
                    f"the state of {name!r} is damaged: {scale_key(key)!r} has a 0 for codes of {key!r} that are not 0"
                )


def check_eight_bits(xp: Space[A], name: object, s: State[A], wanted: Mapping[str, str | None]) -> None:
    """Refuse saved entries that should have eight bits, of some kind, and have others. wanted: dtypes by key."""
    for key, dtype in wanted.items():
        if dtype in (*CODECS, None) and xp.dtype(s[key]) != dtype:
            needs = f"{dtype} here" if dtype else "floating point: there are no codes for what it holds"
            raise StateError(f"the state of {name!r} is damaged: {key!r} is {xp.dtype(s[key])}, and must be {needs}")


def all_finite(xp: Space[A], x: A) -> Truth:
    return xp.isfinite(xp.maximum(xp.amax(xp.abs(xp.astype(x, arithmetic(xp.dtype(x)))), None), 0.0))
