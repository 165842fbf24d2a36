"""How a step differs from its page, in words: candidates are the page with one thing changed, and the other pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeAlias

import numpy as np

from thalweg.audit.page import SKIPPED, SMALL, UNITS, Comparison, Step, norm, wide
from thalweg.audit.report import AS_PAGE
from thalweg.dtypes import NARROW
from thalweg.errors import OptimError
from thalweg.rules import RULES, Rule
from thalweg.rules.entries import Moment
from thalweg.rules.options import alternatives, choices_of, hints_of

#: A step whose number is so large that no bias is left to correct.
LATE = 10**9
#: Said of a step that nothing explains.
NONE = "along none of our pages"
#: How close two factors are that are told as one: figures are shown with as many digits.
ALIKE = 1e-3
Groups: TypeAlias = Sequence[Mapping[str, Any]]
#: Words, the step as they have it, and the share of the tensor that is taken off besides.
Candidate: TypeAlias = tuple[str, Step, float]


def find_verdicts(sample: Sequence[Step], groups: Groups) -> list[tuple[str, Comparison]]:
    """What became of each step. What no page explains in one tensor is not looked for in larger ones of its rule."""
    found, unexplained = dict[int, tuple[str, Comparison]](), dict[type[Rule], str]()
    for step in sorted(sample, key=lambda each: each.before.size):
        found[id(step)] = find_verdict(step, sample, groups, unexplained.get(type(step.rule), ""))
        if found[id(step)][0].startswith(NONE):
            unexplained.setdefault(type(step.rule), step.name)
    return [found[id(step)] for step in sample]


def find_verdict(step: Step, sample: Sequence[Step], groups: Groups, like: str) -> tuple[str, Comparison]:
    """What became of a step in words, and how far it is from its page.

    groups: the options of all, with "lr". like: a smaller tensor whose step no page explains.
    """
    found, size = step.compare(), step.before.size
    infinite = ~np.isfinite(step.after)
    if step.grad_scale == SKIPPED:
        return "moved in a step that was to be skipped" if step.move.any() else AS_PAGE, found
    if missing := int((~np.isfinite(step.gradient)).sum()):
        return f"its gradient is not finite in {missing} of {size} elements", found
    if infinite.any() and np.isfinite(found.delta).all():
        at_zero = int((infinite & (step.gradient == 0)).sum())
        where = f", {at_zero} of them where the gradient is 0" if at_zero else ""
        return f"not finite in {int(infinite.sum())} of {size} elements{where}, and the page's step is finite", found
    if found.fits and (words := find_hidden_decay(step)):
        return words, found
    if found.fits:
        if 2 * found.lost > found.moved:
            return f"lost in rounding to {step.dtype}: {found.lost} of {found.moved} elements have not moved", found
        return AS_PAGE if found.allowed < 1 else f"{AS_PAGE}, as far as {step.dtype} can tell", found
    if not step.move.any():
        still = ": its gradient is 0, and the page moves on by its state" if not step.gradient.any() else ""
        return f"not moved{still}", found
    if like and size > SMALL:
        return f"{NONE}, as {like!r}", found
    return find_cause(step, candidates(step, sample, groups), groups) or find_nearest(step), found


def find_cause(step: Step, changed_steps: Iterable[Candidate], groups: Groups) -> str:
    """The first candidate that is what happened; else the first along which the step went further, or less far."""
    told = find_factor(step, 0.0, groups) or find_shrinkage(step)
    for words, changed, shrink in changed_steps:  # one at a time: their pages are as large as the tensor
        if fits(changed, 1.0, shrink):
            return words
        if not told and is_runnable(changed) and (factor := find_factor(changed, shrink, groups)):
            told = f"{words}, {factor}"
    return told


def is_runnable(step: Step) -> bool:
    """Whether the page can be run on this state, which may be another's."""
    try:
        return step.page is not None
    except (OptimError, ValueError, TypeError, KeyError, IndexError):
        return False


def fits(step: Step, factor: float = 1.0, shrink: float = 0.0) -> bool:
    """Whether this is what happened, as far as dtypes can tell."""
    if not is_runnable(step):
        return False
    delta = factor * wide(step.page.delta) - shrink * wide(step.before)
    if not norm(step.move - delta) < norm(delta):  # no more may be off than is allowed
        return False
    found = step.compare(factor, shrink)
    return found.fits and found.allowed < 1


def candidates(step: Step, sample: Sequence[Step], groups: Groups) -> Iterator[Candidate]:
    """The page with one thing changed, the likely ones first."""
    rule, decay = step.rule, getattr(step.rule, "weight_decay", 0.0)
    if decay:
        none, coupled = step.with_options(weight_decay=0.0), decay / step.grad_scale * wide(step.before)
        yield "decay is missing", none, 0.0
        yield "decay is applied twice", step.with_options(weight_decay=2 * decay), 0.0
        yield "decay is not scaled by lr", none, decay
        yield "decay is scaled by lr twice", step.with_options(weight_decay=decay * step.rate), 0.0
        yield "decay is coupled: added to the gradient", replace(none, gradient=step.gradient + coupled), 0.0
        yield "decay is decoupled: not added to the gradient", none, step.rate * decay
    for index, group in enumerate(groups):
        for name in sorted(group.keys() & {"lr", *(f.name for f in fields(rule))}):
            value: Any = group[name]
            own = step.lr if name == "lr" else getattr(rule, name)
            if index != step.group and value is not None and value != own:
                changed = replace(step, lr=value) if name == "lr" else step.with_options(**{name: value})
                yield f"with {name}={value!r} of group {index}; its own is {own!r}", changed, 0.0
    yield "bias correction is missing", replace(step, t=LATE), 0.0
    if step.t > 1:
        yield "as if it were its first step", replace(step, t=1), 0.0
        yield "as if it were the step before", replace(step, t=step.t - 1), 0.0
        yield "as if its state were all zero", replace(step, state={}), 0.0
    yield "as if it were the step after", replace(step, t=step.t + 1), 0.0
    for other in sample:
        if other is not step and other.before.shape == step.before.shape and type(other.rule) is type(rule):
            yield f"with the state of {other.name!r}", replace(step, state=other.state), 0.0
            yield f"with the gradient of {other.name!r}", replace(step, gradient=other.gradient), 0.0
    if step.gradient.any():
        yield "its gradient was divided by its own norm", replace(step, grad_scale=1 / norm(step.gradient)), 0.0
    if step.grad_scale != 1:
        yield "gradients are not scaled, as clipping would", replace(step, grad_scale=1.0), 0.0
    for name, value in flips(rule):
        yield f"as with {name}={value!r}; it has {getattr(rule, name)!r}", step.with_options(**{name: value}), 0.0
    yield from other_pages(step)


def flips(rule: Rule) -> Iterator[tuple[str, Any]]:
    """Options of a rule that have choices, each with another choice that is possible beside the rest."""
    for f in fields(rule):
        own = getattr(rule, f.name)
        for value in (value for kind in alternatives(hints_of(type(rule))[f.name]) for value in choices_of(kind)):
            if (type(value), value) != (type(own), own) and make(type(rule), {**vars(rule), f.name: value}):
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


def other_pages(step: Step) -> Iterator[Candidate]:
    """The pages of other rules, with the options that they have in common with this one, and by default."""
    shape, known = step.before.shape, {f.name: getattr(step.rule, f.name) for f in fields(step.rule)}
    kept = [step.state[key] for key in step.rule.keys(shape, Moment) if key in step.state]
    memory = known.get("momentum") or known.get("betas", (0.9,))[0]
    shared = {name: known[name] for name in ("momentum", "betas", "weight_decay", "nesterov") if name in known}
    own: dict[str, list[dict[str, Any]]] = {
        "SGD": [{"momentum": 0.0}, {"momentum": memory}, {"momentum": memory, "dampening": memory}],
        "AdamW": [{"decoupled": False}],
    }
    for name, rule in RULES.items():
        if rule.has_factors and (step.t > 1 or step.before.size > SMALL):  # its state is unknown, or slow to make
            continue
        for options in (*own.get(name, ()), {}, shared):
            made = make(rule, {"weight_decay": known.get("weight_decay", 0.0), **options}, shape)
            if made is not None and made != step.rule:
                entries = made.entries(shape)
                like = {key: kept[0] for key, entry in entries.items() if isinstance(entry, Moment) and kept}
                state = {key: step.state.get(key, like.get(key)) for key in entries}
                whole: Any = state if all(entry is not None for entry in state.values()) else {}
                told = ", ".join(f"{key}={value!r}" for key, value in options.items())
                yield f"as {name}{f' with {told}' if told else ''} would", replace(step, rule=made, state=whole), 0.0


def find_factor(step: Step, shrink: float, groups: Groups) -> str:
    """How many times as far along a page the step went, in words; "" if it did not go along it."""
    delta, move = wide(step.page.delta), step.move + shrink * wide(step.before)
    squares = float((delta * delta).sum())
    k = float((move * delta).sum()) / squares if squares else 0.0
    if not abs(k - 1) > ALIKE or not k or not fits(step, k, shrink):
        return ""
    rates = [group["lr"] for group in groups if abs(k * step.rate - float(group.get("lr") or 0.0)) < ALIKE * k]
    why = f": by the lr of another group, {rates[0]!r}" if rates and step.lr else ""
    if abs(norm(move) - step.rate) < ALIKE * step.rate:
        why = ": its update was divided by its own norm"
    return f"moved {k:.4g} times as far as the page{why}" if k > 0 else f"moved {-k:.4g} times as far, uphill"


def find_shares(step: Step) -> tuple[Step, float, float, float]:
    """The step without decay, how many times as far it went, the share of the tensor that is taken off, and its error.

    The error is that of the mean of so many elements, each off by what is left over.
    """
    none = step.with_options(weight_decay=0.0) if getattr(step.rule, "weight_decay", 0.0) else step
    p, move = wide(step.before).ravel(), step.move.ravel()
    columns = np.stack([np.broadcast_to(wide(none.page.delta), step.before.shape).ravel(), -p], 1)
    if p.size < 3 or not p.any() or not np.isfinite(columns).all():  # two numbers are always told by two
        return none, 1.0, 0.0, np.inf
    (k, shrink), *_ = np.linalg.lstsq(columns, move, rcond=None)
    return none, float(k), float(shrink), norm(move - columns @ [k, shrink]) / norm(p) / p.size**0.5


def find_shrinkage(step: Step) -> str:
    """How many times as far it went and how much of the tensor is taken off besides, in words."""
    (none, k, shrink, error), decay = find_shares(step), getattr(step.rule, "weight_decay", 0.0)
    if not np.isfinite(error) or not fits(none, k, shrink):
        return ""
    return f"moved {k:.4g} times as far as the page without decay, and decay is {shrink / step.rate:.4g}, not {decay:g}"


def find_hidden_decay(step: Step) -> str:
    """A decay that is not the page's where products in 16 bits would hide it from a look at single elements."""
    decay, is_apart = getattr(step.rule, "weight_decay", 0.0), step.rule.is_decay_apart
    is_clear = step.before.size > UNITS**2 and step.dtype not in NARROW  # enough elements for a mean of them
    if not step.of_products or not is_apart or not is_clear or getattr(step.rule, "cautious_decay", False):
        return ""
    _, _, shrink, error = find_shares(step)
    if abs(shrink - step.rate * decay) <= UNITS * error + ALIKE * abs(shrink):
        return ""
    return "decay is missing" if abs(shrink) <= UNITS * error else f"decay is {shrink / step.rate:.3g}, not {decay:g}"


def find_nearest(step: Step) -> str:
    """The page that comes closest, by direction."""
    best, told = -1.0, ""
    for words, changed, _ in [("its own", step, 0.0), *other_pages(step)]:
        delta = wide(changed.page.delta) if is_runnable(changed) else np.zeros(1)
        size = norm(delta) * norm(step.move)
        best, told = max((best, told), (float((delta * step.move).sum()) / size if size else -1.0, words))
    return f"{NONE}; the nearest: {told} (cosine {best:.4f})"
