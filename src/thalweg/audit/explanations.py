"""How a step differs from its page: explanations are tried in their order, and the first that fits is told.

An explanation is the same step by a page with one thing changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import chain
from typing import Any, TypeAlias

import numpy as np

from thalweg.audit.page import SMALL, Step, norm
from thalweg.dtypes import DTYPES
from thalweg.errors import OptimError
from thalweg.rules import RULES, Rule
from thalweg.rules.options import alternatives, choices_of, hints_of

#: The verdict on a step that is the page's.
AS_PAGE = "as the page"
#: A step whose number is so large that no bias is left to correct.
LATE = 10**9
#: How close to 1 a factor is none: figures are shown with as many digits.
ALIKE = 1e-3
#: How many standard errors are no accident, in tensors of more than so many elements.
ERRORS, ENOUGH = 8, 256
#: The options of all groups of parameters, with "lr".
Groups: TypeAlias = Sequence[Mapping[str, Any]]


def judge(step: Step, sample: Sequence[Step] = (), groups: Groups = (), key: str = "") -> tuple[str, float, float]:
    """What became of the parameter, or of an entry of its state, in words; how far it is off the page, and may be.

    sample: the steps of all tensors.
    """
    fits, off, allowed = step.compare(key)
    words = name_fault(step, key, fits=fits)
    if fits and not words:
        words = AS_PAGE if allowed < 1 else f"{AS_PAGE}, as far as {step.dtypes[key]} can tell"
    return words or find_cause(step, [] if key else explain(step, sample, groups), key), off, allowed


def name_fault(step: Step, key: str, *, fits: bool) -> str:
    """What is wrong with a move, whether or not it fits the page, if that can be seen without another page."""
    move, way = step.moves(key)
    infinite, missing = ~np.isfinite(move), int((~np.isfinite(step.gradient)).sum())
    stay, moving = int(((move == 0) & (way != 0)).sum()), int((way != 0).sum())
    if missing and step.scale:
        return f"its gradient is not finite in {missing} of {move.size} elements"
    if infinite.any() and np.isfinite(way).all():
        at_zero = int((infinite & (step.gradient == 0)).sum())
        where = f"{infinite.sum()} of {move.size} elements, {at_zero} of them where the gradient is 0"
        return f"not finite in {where}, and the page's step is finite"
    if not fits and not move.any():
        return "not moved" + ("" if step.gradient.any() else ": its gradient is 0, and the page moves by its state")
    if fits and 2 * stay > moving and step.dtypes[key] != "float64":
        return f"lost in rounding to {step.dtypes[key]}: {stay} of {moving} elements have not moved"
    return "decay is missing" if fits and not key and hides_decay(step) else ""


def find_cause(step: Step, explanations: Iterable[tuple[str, Step]], key: str) -> str:
    """The first explanation that fits; else the first along which it went so many times as far."""
    along = ""
    for words, other in chain([("", step)], explanations):
        if words and is_along(other, key):
            return words
        move, way = other.moves(key)
        factor = float((way * move).sum()) / (norm(way) ** 2 or 1.0)
        if not along and abs(factor - 1) > ALIKE and is_along(other, key, factor):
            times = f"moved {abs(factor):.4g} times as far{' as the page' if factor > 0 else ', uphill'}"
            along = f"{words}, {times}" if words else times
    return along or "is not that of the page, nor along another that is known"


def is_along(step: Step, key: str, factor: float = 1.0) -> bool:
    """Whether this is what happened, as far as dtypes can tell: most of the way has to be along the page."""
    move, way = step.moves(key)
    if not norm(move - factor * way) < norm(factor * way) < np.inf:
        return False
    fits, _, allowed = step.compare(key, factor)
    return fits and allowed < 1


def hides_decay(step: Step) -> bool:
    """Whether the page without decay is clearly nearer, where single elements cannot tell but the mean of all can."""
    if step.gradient.size <= ENOUGH or step.rate * step.decay < 4 * DTYPES[step.dtypes[""]].rounding:
        return False
    (without,) = by(step, type(step.rule), {**vars(step.rule), "weight_decay": 0.0})
    (move, way), turn = step.moves(), without.page[""] - step.page[""]
    size, rest = norm(turn) or 1.0, move - way
    part = float((rest * turn).sum()) / size**2
    return bool(part - 1 / 2 > ERRORS * norm(rest - part * turn) / size / rest.size**0.5)


def explain(step: Step, sample: Sequence[Step], groups: Groups) -> Iterator[tuple[str, Step]]:
    """The same step by pages with one thing changed, each with its words; the likely ones first."""
    rule, options, decay = type(step.rule), vars(step.rule), step.decay
    changes: list[tuple[str, dict[str, Any]]] = []
    if decay:
        decays = {"is missing": 0.0, "is applied twice": 2 * decay, "is not scaled by lr": decay / (step.rate or 1.0)}
        changes += [(f"decay {words}", {"weight_decay": value}) for words, value in decays.items()]
    for index, group in enumerate(groups):
        for name in sorted(group.keys() & {"lr", *options}) if index != step.group else ():
            usual = step.lr if name == "lr" else options[name]
            if group[name] not in (None, usual):
                words = f"with {name}={group[name]!r} of group {index}; its own is {usual!r}"
                changes.append((words, {name: group[name]}))
    for name, hint in hints_of(rule).items():
        for value in (value for kind in alternatives(hint) for value in choices_of(kind)):
            changes.append((f"as with {name}={value!r}; it has {options[name]!r}", {name: value}))
    for words, change in changes:
        for other in by(step, rule, {**options, **change}):
            yield words, replace(other, lr=change.get("lr", step.lr))
    yield "bias correction is missing", replace(step, t=LATE)
    if step.lr:
        size = norm(step.moves()[1]) or 1.0
        yield "its update was divided by its own norm", replace(step, lr=step.lr * step.rate / size)
    for other in sample:
        if other is not step and other.gradient.shape == step.gradient.shape:
            yield f"with the state of {other.name!r}", replace(step, before={**other.before, "": step.before[""]})
    memory = options.get("momentum") or options.get("betas", (0.9,))[0]
    shared: dict[str, Any] = {name: options[name] for name in ("momentum", "betas", "nesterov") if name in options}
    similar: list[dict[str, Any]] = [{}, shared, {"momentum": memory, "dampening": memory}]
    for name, kind in RULES.items():
        if (kind.has_factors and step.t > 1) or (kind.needs_whole and step.gradient.size > SMALL):
            continue  # its state is unknown, or it takes long
        for given in similar:
            known = ", ".join(f"{key}={value!r}" for key, value in given.items() if key in hints_of(kind))
            for other in by(step, kind, {"weight_decay": decay, **given}):
                yield f"as {name}{' with ' * bool(known)}{known} would", other


def by(step: Step, kind: type[Rule], options: Mapping[str, Any]) -> Iterator[Step]:
    """The same step by a rule with those of the options that it has, if there is such a rule for this shape.

    It is given what of the state it keeps too.
    """
    shape = step.gradient.shape
    try:
        rule = kind(**{f.name: options[f.name] for f in fields(kind) if f.name in options})
        rule.validate()
        rule.check_shape("", shape)
    except (OptimError, TypeError):
        return
    rule = rule if kind is type(step.rule) else rule.for_shape(shape)
    sizes = {"": shape} | {key: entry.shape(shape, rule.stacked_axes) for key, entry in rule.entries(shape).items()}
    state = {key: x for key, x in step.before.items() if sizes.get(key) == x.shape}
    yield replace(step, setting=replace(step.setting, rule=rule), before=state)
