"""Where parameters meet rules: precision, rounding and the guard against non-finite numbers.

Rules compute in float32, or in float64 for float64 parameters, whatever parameters, gradients and
state are stored in. Everything is widened on the way in and rounded once on the way out, here and
nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from thalweg.arrays import A, Scalar, Space, State, Truth, Value, is_number
from thalweg.codecs import CODECS, grouping, scale_key
from thalweg.dtypes import DTYPES, NARROW
from thalweg.rules import Rule
from thalweg.rules.entries import Entry, Factor, Spread
from thalweg.rules.noise import chance, normal
from thalweg.rules.rule import Noise, Update, guarded
from thalweg.settings import Numerics
from thalweg.storage import RECORD, all_finite, arithmetic, declared, decoded, storage

#: A stream of random bits apart from the two that normal noise is made of.
ROUNDING_STREAM = 2


class Advance(NamedTuple):
    """A parameter after one step."""

    p: Any
    state: State[Any]
    #: Whether the step was finite and allowed; None under ``on_nonfinite="propagate"``.
    finite: Truth | None
    stats: Mapping[str, Scalar]


def advance(
    xp: Space[A],
    rule: Rule,
    numerics: Numerics,
    p: A,
    g: A,
    s: State[A],
    *,
    t: Scalar,
    tensor: Scalar,
    allowed: Truth | None = None,
    **given: Any,
) -> Advance:
    """Step one parameter. Nothing is written to p, g or s; the new ones are returned.

    allowed: False leaves everything as it was. All else is as :func:`proposed` takes it.
    """
    update = proposed(xp, rule, numerics, p, g, s, t=t, tensor=tensor, **given)
    new, record = written(xp, numerics, p, s, update.delta, tensor=tensor, t=t)
    update.state.update(record)
    finite = finite_throughout(xp, update, new) if numerics.on_nonfinite != "propagate" else None
    return settle(xp, numerics, p, s, update, new, finite, allowed)


def settle(
    xp: Space[A],
    numerics: Numerics,
    p: A,
    s: State[A],
    update: Update,
    new: A,
    finite: Truth | None,
    allowed: Truth | None,
) -> Advance:
    """The new values, or the old ones where the step is not taken. finite: None under on_nonfinite="propagate"."""
    if finite is None and allowed is None:
        return Advance(new, update.state, None, update.stats)
    taken = allowed if finite is None else finite if allowed is None else finite & allowed
    state = update.state
    if numerics.on_nonfinite == "skip" or allowed is not None:
        new = xp.where(taken, new, p)
        state = {key: xp.where(taken, entry, s[key]) for key, entry in state.items()}
    return Advance(new, state, taken, update.stats)


def proposed(
    xp: Space[A],
    rule: Rule,
    numerics: Numerics,
    p: A,
    g: A,
    s: State[A],
    *,
    t: Scalar,
    lr: Scalar | None,
    lr_scale: Scalar,
    tensor: Scalar,
    grad_scale: Scalar | None = None,
    noise: Noise[A] | None = None,
) -> Update:
    """What the rule answers: delta in the precision of the arithmetic, state as it is stored.

    tensor: the parameter's number for random bits. grad_scale: multiplies the gradient. noise: gives the numbers of
    ``rules.noise.normal`` by other means.
    """
    wide, gradient, old, now = widened(xp, rule, numerics, p, g, s, t=t, grad_scale=grad_scale)
    noise = noise or (lambda: normal(xp, wide, seed=numerics.seed, tensor=tensor, t=t))
    update = rule.update(xp, gradient, old, wide, t=now, lr=lr, lr_scale=lr_scale, noise=noise)
    update = guarded(xp, rule, gradient, update)
    del old
    state = stored(xp, rule, numerics, p, s, update, tensor=tensor, t=t)
    for key in may_overflow(xp, rule, p, state):
        state[key] = xp.where(all_finite(xp, state[key]), state[key], s[key])
    return update._replace(state=state)


def widened(
    xp: Space[A], rule: Rule, numerics: Numerics, p: A, g: A, s: State[A], *, t: Scalar, grad_scale: Scalar | None
) -> tuple[A, A, State[A], Scalar]:
    """p, g, s and t as a rule is given them, in the precision of the arithmetic."""
    precision = arithmetic(xp.dtype(p))
    wide, gradient = seen(xp, p, s), xp.astype(g, precision)
    if grad_scale is not None:
        gradient = gradient * grad_scale
    if numerics.maximize:
        gradient = -gradient
    state = {key: xp.astype(entry, precision) for key, entry in decoded(xp, rule, p, s).items()}
    return wide, gradient, state, t if is_number(t) else xp.astype(t, precision)


def stored(
    xp: Space[A], rule: Rule, numerics: Numerics, p: A, s: State[A], update: Update, *, tensor: Scalar, t: Scalar
) -> State[A]:
    """The new state in the dtypes in which it is kept."""
    shape = xp.shape(p)
    entries, state = rule.entries(shape), dict(s)  # in the old order: a program compiled for one step serves the next
    entries_before = declared(xp, s)
    streams = state_streams(list(entries_before))
    for key, old in entries_before.items():
        entry = entries.get(key)  # None: a schedule has it at 0 in this step, and state is kept for the next
        groups = grouping(shape, rule.stacked_axes) if xp.dtype(old) in CODECS else None
        as_kept = xp.dtype(old) if entry is None else storage(entry, xp.dtype(p), numerics, groups)
        new, draw = update.state[key], None
        if numerics.state_rounding == "stochastic" and is_rounded_at_random(entry, as_kept):
            stream, half = streams[key]
            draw = chance(xp, new, seed=numerics.seed, tensor=tensor, t=t, stream=stream, half=half)
        if groups is not None:
            state[key], state[scale_key(key)] = CODECS[as_kept].encode(xp, new, groups, draw)
        else:
            state[key] = xp.astype(new if draw is None else rounded_stochastically(xp, new, as_kept, draw), as_kept)
    return state


def state_streams(keys: Sequence[str]) -> dict[str, tuple[int, int]]:
    """By which stream of random bits each entry of a state is rounded, and which half of them: two share 32 bits."""
    return {key: (ROUNDING_STREAM + 1 + i // 2, i % 2) for i, key in enumerate(sorted(keys))}


def is_rounded_at_random(entry: Entry | None, stored: str) -> bool:
    """Whether ``state_rounding`` concerns an entry: one as large as its parameter, in fewer bits than are computed."""
    return isinstance(entry, Spread) and not entry.over and stored in (*NARROW, *CODECS)


def may_overflow(xp: Space[A], rule: Rule, p: A, state: State[A]) -> list[str]:
    """Factors that are kept as they were if the new ones overflow: float16 ends at 65504."""
    narrow = [key for key, entry in state.items() if xp.dtype(entry) == "float16"]
    entries = rule.entries(xp.shape(p)) if narrow else {}
    return [key for key in narrow if isinstance(entries.get(key), Factor)]


def seen(xp: Space[A], p: A, s: State[A]) -> A:
    """A parameter as its rule sees it: with what rounding has cost it, if that is known."""
    wide = xp.astype(p, arithmetic(xp.dtype(p)))
    if RECORD not in s:
        return wide
    return wide + xp.astype(s[RECORD], xp.dtype(wide)) * recorded_unit(xp, wide, xp.dtype(p))


def recorded_unit(xp: Space[A], p: A, dtype: str) -> A:
    return xp.spacing(p, DTYPES[dtype].digits, DTYPES[dtype].least) * 2.0**-8


def written(
    xp: Space[A], numerics: Numerics, p: A, s: State[A], delta: A, *, tensor: Scalar, t: Scalar
) -> tuple[A, State[A]]:
    """p after a step, in its own dtype, and the record of what that cost: here alone are parameters rounded."""
    dtype = xp.dtype(p)
    new = seen(xp, p, s) + delta
    if dtype in NARROW and numerics.rounding == "stochastic":
        draw = chance(xp, new, seed=numerics.seed, tensor=tensor, t=t, stream=ROUNDING_STREAM)
        new = rounded_stochastically(xp, new, dtype, draw)
    rounded = xp.astype(new, dtype)
    if RECORD not in s:
        return rounded, {}
    wide = xp.astype(rounded, xp.dtype(new))
    steps = xp.floor((new - wide) / recorded_unit(xp, wide, dtype) + 0.5)
    steps = xp.where(xp.abs(steps) <= 128.0, xp.minimum(steps, 127.0), 0.0)  # 0 where it is not finite
    return rounded, {RECORD: xp.astype(xp.maximum(steps, -127.0), "int8")}


def finite_throughout(xp: Space[A], update: Update, new: A) -> Truth:
    """Whether a step is finite, what it writes included: float16 ends at 65504."""
    finite = every(xp, update.finite)
    for entry in written_entries(xp, update, new):
        finite = all_finite(xp, entry) & finite  # in this order: a rule may say True
    return finite


def written_entries(xp: Space[A], update: Update, new: A) -> list[A]:
    """What may overflow when it is rounded, although the update is finite."""
    return [new, *(entry for entry in update.state.values() if xp.dtype(entry) == "float16")]


def every(xp: Space[A], by_slice: Truth) -> Truth:
    """Whether something holds in every slice."""
    if isinstance(by_slice, bool):
        return by_slice
    (failures,) = xp.sums((xp.where(by_slice, 0.0, 1.0), None))
    return failures == 0


def rounded_stochastically(xp: Space[A], x: A, dtype: str, chance: A) -> Value:
    """x moved to one of its two neighbours in a narrower dtype, right on average.

    So steps that are smaller than half the distance between neighbours still count.
    """
    distance = xp.spacing(x, DTYPES[dtype].digits, DTYPES[dtype].least)
    below = xp.floor(x / distance)  # exact, like the fraction above it: distances are powers of 2
    return (below + xp.where(x / distance - below > chance, 1.0, 0.0)) * distance
