"""How a step differs from its page, in words: the same page with one thing changed, tried one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeAlias

import numpy as np

from thalweg.audit.page import SKIPPED, SMALL, Comparison, Step, norm, wide
from thalweg.audit.report import AS_PAGE
from thalweg.dtypes import NARROW
from thalweg.errors import OptimError
from thalweg.rules import RULES, Rule
from thalweg.rules.entries import Moment
from thalweg.rules.options import alternatives, choices_of, hints_of

#: A step whose number is so large that no bias is left to correct.
LATE = 10**9
#: How close two factors are that are told as one: figures are shown with as many digits.
ALIKE = 1e-3
#: So many standard errors of a decay are told from none, where a tensor has so many elements.
ERRORS, ENOUGH = 8, 256
Groups: TypeAlias = Sequence[Mapping[str, Any]]
Variant: TypeAlias = tuple[str, Step]


def find_verdict(step: Step, sample: Sequence[Step], groups: Groups) -> tuple[str, Comparison]:
    """What became of a step in words, and how far it is from its page. groups: the options of all, with "lr"."""
    compared, size, infinite = step.compare(), step.before.size, ~np.isfinite(step.after)
    if step.scale == SKIPPED:
        verdict = "moved in a step that was to be skipped" if step.move.any() else AS_PAGE
    elif missing := int((~np.isfinite(step.gradient)).sum()):
        verdict = f"its gradient is not finite in {missing} of {size} elements"
    elif infinite.any() and np.isfinite(compared.delta).all():
        at_zero = int((infinite & (step.gradient == 0)).sum())
        where = f", {at_zero} of them where the gradient is 0" if at_zero else ""
        verdict = f"not finite in {int(infinite.sum())} of {size} elements{where}, and the page's step is finite"
    elif compared.fits and (decay := find_hidden_decay(step)):
        verdict = decay
    elif compared.fits and 2 * compared.lost > compared.moved:
        verdict = f"lost in rounding to {step.dtype}: {compared.lost} of {compared.moved} elements have not moved"
    elif compared.fits:
        verdict = AS_PAGE if compared.allowed < 1 else f"{AS_PAGE}, as far as {step.dtype} can tell"
    elif step.move.any():
        verdict = find_cause(step, sample, groups)
    else:
        verdict = "not moved" + ("" if step.gradient.any() else ": its gradient is 0, and the page moves by its state")
    return verdict, compared


def find_cause(step: Step, sample: Sequence[Step], groups: Groups) -> str:
    """The first variant that is what happened; else one along which the step went further; else the nearest."""
    told, nearest = "", (-1.0, "")
    for words, variant in [("", step), *variants(step, sample, groups)]:
        factor, cosine = project(variant)
        nearest = max(nearest, (cosine, words or "its own"))
        if words and fits(variant):
            return words
        if not told and abs(factor - 1) > ALIKE and fits(variant, factor):
            told = f"{words}, {name_factor(step, factor)}" if words else name_factor(step, factor)
    return told or f"along none of our pages; the nearest: {nearest[1]} (cosine {nearest[0]:.4f})"


def project(step: Step) -> tuple[float, float]:
    """How many times as far along its page a step went, and the cosine between the two; 0 if the page cannot be run."""
    try:
        delta = wide(step.page.delta)
    except (OptimError, ValueError, TypeError, KeyError, IndexError):  # on a state that may be another's
        return 0.0, 0.0
    product, size = float((delta * step.move).sum()), norm(delta)
    return (product / size**2, product / (size * norm(step.move))) if 0 < size < np.inf else (0.0, 0.0)


def fits(step: Step, factor: float = 1.0) -> bool:
    """Whether this is what happened, as far as dtypes can tell: most of the way has to be along the page."""
    if project(step)[1] ** 2 < 0.5:
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
    if not step.decay or not is_clear or getattr(step.rule, "cautious_decay", False):
        return ""
    way = wide(step.with_options(weight_decay=0.0).page.delta) - wide(step.page.delta)
    rest = step.move - wide(step.page.delta)
    part = float((rest * way).sum() / np.square(way).sum()) if way.any() else 0.0
    error = norm(rest - part * way) / norm(way) / way.size**0.5 if way.any() else 1.0
    if abs(part) <= ERRORS * error + ALIKE:
        return ""
    return (
        f"decay is of {(1 - part) * step.decay:.3g}, not {step.decay:g}"
        if abs(part - 1) > ALIKE**0.5
        else "decay is missing"
    )


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
    yield "as if its state were all zero", replace(step, state={})
    for other in sample:
        if other is not step and other.before.shape == step.before.shape and type(other.rule) is type(rule):
            yield f"with the state of {other.name!r}", replace(step, state=other.state)
            yield f"with the gradient of {other.name!r}", replace(step, gradient=other.gradient)
    if step.scale != 1:
        yield "gradients are not scaled, as clipping would", replace(step, scale=1.0)
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
