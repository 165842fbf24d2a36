"""How a step differs from its page, in words: the same page with one thing changed, tried one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeAlias

import numpy as np

from thalweg.audit.page import SKIPPED, SMALL, Comparison, Step, norm, wide
from thalweg.dtypes import DTYPES, NARROW
from thalweg.errors import OptimError
from thalweg.rules import RULES, Rule
from thalweg.rules.entries import Moment
from thalweg.rules.options import alternatives, choices_of, hints_of

#: The verdict on a step that is the page's.
AS_PAGE = "as the page"
#: A step whose number is so large that no bias is left to correct.
LATE = 10**9
#: How close two factors are that are told as one: figures are shown with as many digits.
ALIKE = 1e-3
#: So many standard errors of a decay are told from none, where a tensor has so many elements.
ERRORS, ENOUGH = 8, 256
Groups: TypeAlias = Sequence[Mapping[str, Any]]
Variant: TypeAlias = tuple[str, Step]


def find_verdict(step: Step, compared: Comparison, sample: Sequence[Step], groups: Groups) -> str:
    """What became of a step, in words. groups: the options of all, with "lr"."""
    size, infinite, moves = step.before.size, ~np.isfinite(step.after), wide(step.page.delta) != 0
    if step.scale == SKIPPED:
        return "moved in a step that was to be skipped" if step.move.any() else AS_PAGE
    if missing := int((~np.isfinite(step.gradient)).sum()):
        return f"its gradient is not finite in {missing} of {size} elements"
    if infinite.any() and np.isfinite(step.page.delta).all():
        at_zero = int((infinite & (step.gradient == 0)).sum())
        where = f", {at_zero} of them where the gradient is 0" if at_zero else ""
        return f"not finite in {int(infinite.sum())} of {size} elements{where}, and the page's step is finite"
    if compared.fits:
        lost = int((moves & (step.move == 0)).sum())
        if 2 * lost > moves.sum():
            return f"lost in rounding to {step.dtype}: {lost} of {moves.sum()} elements have not moved"
        can_tell = "" if compared.allowed < 1 else f", as far as {step.dtype} can tell"
        return find_hidden_decay(step) or f"{AS_PAGE}{can_tell}"
    if step.move.any():
        return find_cause(step, sample, groups)
    return "not moved" + ("" if step.gradient.any() else ": its gradient is 0, and the page moves by its state")


def find_cause(step: Step, sample: Sequence[Step], groups: Groups) -> str:
    """The first variant that is what happened; else one along which the step went further; else the nearest."""
    told, least, nearest = "", 2.0, ""
    for words, variant in [("", step), *variants(step, sample, groups)]:
        if not is_runnable(variant):
            continue
        if words and fits(variant):
            return words
        delta = wide(variant.page.delta)
        factor = float((delta * step.move).sum()) / (norm(delta) ** 2 or 1.0)
        apart = norm(step.move - delta) / norm(step.move)
        if apart < least / 2:  # its own comes first, and another has to be much nearer
            least, nearest = apart, f"; the nearest: {words or 'its own'}, off by {apart:.1e}"
        if not told and abs(factor - 1) > ALIKE and fits(variant, factor):
            told = f"{words}, {name_factor(step, factor)}" if words else name_factor(step, factor)
    return told or f"along none of our pages{nearest}"


def is_runnable(step: Step) -> bool:
    """Whether the page can be run on this state, which may be another's, and moves it."""
    try:
        return bool(np.isfinite(step.page.delta).all()) and norm(step.page.delta) > 0
    except (OptimError, ValueError, TypeError, KeyError, IndexError):
        return False


def fits(step: Step, factor: float = 1.0) -> bool:
    """Whether this is what happened, as far as dtypes can tell: most of the way has to be along the page."""
    delta = factor * wide(step.page.delta)
    if not norm(step.move - delta) < norm(delta):
        return False
    compared = step.compare(factor)
    return compared.fits and compared.allowed < 1


def name_factor(step: Step, factor: float) -> str:
    if abs(norm(step.move) - step.rate) < ALIKE * step.rate:
        return "its update was divided by its own norm"
    return f"moved {abs(factor):.4g} times as far{' as the page' if factor > 0 else ', uphill'}"


def find_hidden_decay(step: Step) -> str:
    """A decay that is not the page's where it is too small for a look at single elements, but not for their mean.

    By the part of the way that was gone from the page to the same page without decay, beside its standard error.
    """
    is_clear = step.before.size > ENOUGH and step.dtype not in NARROW and step.rule.is_decay_apart
    if not is_clear or not step.rate * step.decay or getattr(step.rule, "cautious_decay", False):
        return ""
    way = wide(step.with_options(weight_decay=0.0).page.delta) - wide(step.page.delta)
    rest, size = step.move - wide(step.page.delta), norm(way) or 1.0
    part = float((rest * way).sum()) / size**2
    rounded = DTYPES[step.dtype].rounding / abs(step.rate * step.decay)  # in 1 - lr * decay
    if abs(part) <= ERRORS * norm(rest - part * way) / size / way.size**0.5 + rounded + ALIKE:
        return ""
    decay = (1 - part) * step.decay
    return f"decay is of {decay:.3g}, not {step.decay:g}" if abs(part - 1) > 0.1 else "decay is missing"


# ---- the page with one thing changed


def variants(step: Step, sample: Sequence[Step], groups: Groups) -> Iterator[Variant]:
    """In words, and as the step would have been; the likely ones first."""
    rule = step.rule
    if step.decay:
        none, coupled = step.with_options(weight_decay=0.0), step.decay / step.scale * wide(step.before)
        yield "decay is missing", none
        yield "decay is applied twice", step.with_options(weight_decay=2 * step.decay)
        yield "decay is not scaled by lr", step.with_options(weight_decay=step.decay / (step.rate or 1.0))
        yield "decay is scaled by lr twice", step.with_options(weight_decay=step.decay * step.rate)
        yield "decay is coupled: added to the gradient", replace(none, gradient=step.gradient + coupled)
    for index, group in enumerate(groups):
        for name in sorted(group.keys() & {"lr", *(f.name for f in fields(rule))}):
            value: Any = group[name]
            usual = step.lr if name == "lr" else getattr(rule, name)
            if index != step.group and value is not None and value != usual:
                changed = replace(step, lr=value) if name == "lr" else step.with_options(**{name: value})
                yield f"with {name}={value!r} of group {index}; its own is {usual!r}", changed
    yield "bias correction is missing", replace(step, t=LATE)
    for t in {1, step.t - 1, step.t + 1} - {0, step.t}:
        yield f"as if it were step {t}, and it is step {step.t}", replace(step, t=t)
    for other in sample:
        if other is not step and other.before.shape == step.before.shape and type(other.rule) is type(rule):
            yield f"with the state of {other.name!r}", replace(step, state=other.state)
    for name, value in flips(rule):
        yield f"as with {name}={value!r}; it has {getattr(rule, name)!r}", step.with_options(**{name: value})
    yield from other_pages(step)


def flips(rule: Rule) -> Iterator[tuple[str, Any]]:
    """Options of a rule that have choices, each with another choice that is possible beside the rest."""
    for f in fields(rule):
        usual = getattr(rule, f.name)
        for value in (value for kind in alternatives(hints_of(type(rule))[f.name]) for value in choices_of(kind)):
            if (type(value), value) != (type(usual), usual) and make(type(rule), {**vars(rule), f.name: value}):
                yield f.name, value


def make(rule: type[Rule], options: Mapping[str, Any], shape: tuple[int, ...] = (1, 1, 1, 1)) -> Rule | None:
    """A rule with those of the options that it has; None: not with these, or not for this shape."""
    try:
        made = rule(**{f.name: options[f.name] for f in fields(rule) if f.name in options})
        made.validate()
        made.check_shape("", shape)
    except (OptimError, TypeError):
        return None
    return made.for_shape(shape)


def other_pages(step: Step) -> Iterator[Variant]:
    """The pages of other rules, by default and with the options that they have in common with this one."""
    shape, known = step.before.shape, vars(step.rule)
    memory = known.get("momentum") or known.get("betas", (0.9,))[0]
    shared = {name: known[name] for name in ("momentum", "betas", "nesterov") if name in known}
    beside: dict[str, list[dict[str, Any]]] = {
        "SGD": [{"momentum": 0.0}, {"momentum": memory}, {"momentum": memory, "dampening": memory}],
        "AdamW": [{"decoupled": False}],
    }
    moments = [step.state[key] for key in step.rule.keys(shape, Moment) if key in step.state]
    for name, rule in RULES.items():
        if (rule.has_factors and step.t > 1) or (rule.needs_whole and step.before.size > SMALL):
            continue  # its state is unknown, or it takes long
        for options in (*beside.get(name, ()), {}, shared):
            made = make(rule, {"weight_decay": step.decay, **options}, shape)
            if made is None or made == step.rule:
                continue
            entries = made.entries(shape)
            like = {key: moments[0] for key, entry in entries.items() if isinstance(entry, Moment) and moments}
            state = {key: entry for key, entry in {**like, **step.state}.items() if key in entries}
            told = ", ".join(f"{key}={value!r}" for key, value in options.items())
            page = replace(step.setting, rule=made)
            whole = state if len(state) == len(entries) else {}
            yield f"as {name}{f' with {told}' if told else ''} would", replace(step, setting=page, state=whole)
