"""How a step differs from its page, in words: candidates are the page with one thing changed, and the other pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from thalweg.audit.page import Comparison, Step, norm
from thalweg.audit.report import AS_PAGE
from thalweg.errors import OptimError
from thalweg.rules import RULES, Rule
from thalweg.rules.entries import Moment
from thalweg.rules.options import alternatives, choices_of, hints_of

#: A step whose number is so large that no bias is left to correct.
LATE = 10**9
#: How close two factors are that are told as one: figures are shown with as many digits.
ALIKE = 1e-3


def find_verdict(step: Step, others: Sequence[Step], groups: Sequence[Mapping[str, Any]]) -> tuple[str, Comparison]:
    """What became of a step in words, and how far it is from its page.

    others: the other tensors of the sample. groups: the options of all groups, with "lr".
    """
    found = step.compare()
    if missing := int((~np.isfinite(step.gradient)).sum()):
        return f"its gradient is not finite ({missing} of {step.gradient.size} elements)", found
    if wrong := int((~np.isfinite(step.after)).sum()):
        at_zero = int((~np.isfinite(step.after) & (step.gradient == 0)).sum())
        where = f", {at_zero} of them where the gradient is 0" if at_zero else ""
        if np.isfinite(found.delta).all():
            return f"not finite in {wrong} elements{where}, and the page's step is finite there", found
    if found.fits:
        most = 2 * found.lost > found.moved
        lost = f"lost in rounding to {step.dtype}: {found.lost} of {found.moved} elements have not moved"
        return (lost if most else AS_PAGE), found
    if not step.move.any():
        still = "; its gradient is 0, and the page moves on by its state" if not step.gradient.any() else ""
        return f"not moved{still}", found
    for words, changed, shrink in candidates(step, others, groups):
        if fits(changed, 1.0, shrink):
            return words, found
    if words := find_factor(step, found.delta, 0.0, groups):
        return words, found
    if words := find_shrinkage(step):
        return words, found
    for words, changed, shrink in candidates(step, others, groups):
        if is_computable(changed) and (k := find_factor(changed, changed.compare().delta, shrink, groups)):
            return f"{words}, {k}", found
    return find_nearest(step), found


def is_computable(step: Step) -> bool:
    try:
        return bool(np.isfinite(np.asarray(step.page.delta)).all())
    except (OptimError, ValueError, KeyError, IndexError):
        return False


def fits(step: Step, factor: float = 1.0, shrink: float = 0.0) -> bool:
    return is_computable(step) and step.compare(factor, shrink).fits


# ---- the page with one thing changed


def candidates(
    step: Step, others: Sequence[Step], groups: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, Step, float]]:
    """Words, the step as they have it, and the share of the tensor that is taken off besides."""
    yield from of_decay(step)
    for index, group in enumerate(groups):
        for name, value in group.items():
            own = step.lr if name == "lr" else getattr(step.rule, name, value)
            if index != step.group and value != own and isinstance(value, (int, float, tuple)):
                rate: Any = value
                changed = replace(step, lr=rate) if name == "lr" else step.with_options(**{name: value})
                yield f"with {name}={value!r} of group {index}, and its own is {own!r}", changed, 0.0
    yield "bias correction is missing", replace(step, t=LATE), 0.0
    if step.t > 1:
        yield "as if it were its first step", replace(step, t=1), 0.0
        yield "as if it were the step before", replace(step, t=step.t - 1), 0.0
        yield "as if its state were all zero", replace(step, state={}), 0.0
        yield "as if its state were all zero and this its first step", replace(step, state={}, t=1), 0.0
    yield "as if it were the step after", replace(step, t=step.t + 1), 0.0
    for other in others:
        if other is not step and other.before.shape == step.before.shape and type(other.rule) is type(step.rule):
            yield f"with the state of {other.name!r}", replace(step, state=other.state), 0.0
            yield f"with the gradient of {other.name!r}", replace(step, gradient=other.gradient), 0.0
    size = norm(step.gradient) or 1.0
    yield "as if its gradient were divided by its own norm", replace(step, grad_scale=1 / size), 0.0
    yield "as if its gradient were 0", replace(step, grad_scale=0.0), 0.0
    if step.grad_scale != 1:
        yield "gradients are not clipped", replace(step, grad_scale=1.0), 0.0
    for name, value in flips(step.rule):
        yield (
            f"as with {name}={value!r}, and it has {getattr(step.rule, name)!r}",
            step.with_options(**{name: value}),
            0.0,
        )
    yield from other_pages(step)


def of_decay(step: Step) -> Iterator[tuple[str, Step, float]]:
    decay: Any = getattr(step.rule, "weight_decay", 0.0)
    if not decay:
        return
    none, rate = step.with_options(weight_decay=0.0), (step.lr or 1.0) * step.lr_scale
    yield "decay is missing", none, 0.0
    yield "decay is applied twice", step.with_options(weight_decay=2 * decay), 0.0
    yield "decay is not scaled by lr", none, decay
    yield "decay is scaled by lr twice", step.with_options(weight_decay=decay * rate), 0.0
    yield (
        "decay is coupled: added to the gradient, and not apart from it",
        replace(none, gradient=step.gradient + decay / step.grad_scale * np.asarray(step.before, "float64")),
        0.0,
    )
    yield "decay is decoupled: apart from the gradient, and not added to it", none, rate * decay


def flips(rule: Rule) -> Iterator[tuple[str, Any]]:
    """Options of a rule that have choices, each with another choice that is possible beside the rest."""
    for f in fields(rule):
        for kind in alternatives(hints_of(type(rule))[f.name]):
            for value in choices_of(kind):
                if type(value) is not type(getattr(rule, f.name)) or value != getattr(rule, f.name):
                    try:
                        replace(rule, **{f.name: value}).validate()
                    except OptimError:
                        continue
                    yield f.name, value


# ---- other pages


def other_pages(step: Step) -> Iterator[tuple[str, Step, float]]:
    """The pages of other rules with what their options have in common with this one's, and some of their own."""
    known = {f.name: getattr(step.rule, f.name) for f in fields(step.rule)}
    moments = step.rule.keys(step.before.shape, Moment)
    kept = [step.state[key] for key in moments if key in step.state]
    momentum = known.get("momentum") or known.get("betas", (0.9,))[0]
    for name, rule in RULES.items():
        shared = {n: known[n] for n in ("momentum", "betas", "weight_decay", "nesterov", "eps") if n in known}
        several: list[dict[str, Any]] = [*pages_of(name, momentum), shared]
        for options in several:
            made = make(rule, {"weight_decay": known.get("weight_decay", 0.0), **options}, step.before.shape)
            if made is None or (made == step.rule):
                continue
            own, entries = {}, made.entries(step.before.shape)
            for key, entry in entries.items():
                like = step.state.get(key, kept[0] if isinstance(entry, Moment) and kept else None)
                if like is not None and like.shape == entry.shape(step.before.shape, made.stacked_axes):
                    own[key] = like
            whole = own if len(own) == len(entries) else {}
            told = ", ".join(f"{n}={v!r}" for n, v in options.items()) or "its defaults"
            yield f"as {name} with {told} would", replace(step, rule=made, state=whole), 0.0


def pages_of(name: str, momentum: float) -> Iterable[dict[str, Any]]:
    if name == "SGD":
        return {"momentum": 0.0}, {"momentum": momentum}, {"momentum": momentum, "dampening": momentum}
    if name == "AdamW":
        return {"weight_decay": 0.0}, {"decoupled": False}
    return ({},)


def make(rule: type[Rule], options: Mapping[str, Any], shape: tuple[int, ...]) -> Rule | None:
    """A rule with those of the options that it has; None: not with these, or not for this shape."""
    names = {f.name for f in fields(rule)}
    try:
        made = rule(**{name: value for name, value in options.items() if name in names})
        made.validate()
        made.check_shape("", shape)
    except (OptimError, TypeError):
        return None
    return made.for_shape(shape)


# ---- how far


def find_factor(step: Step, delta: Any, shrink: float, groups: Sequence[Mapping[str, Any]]) -> str:
    """How many times as far along a page the step went, in words; "" if it did not go along it."""
    size = float((delta * delta).sum())
    k = float(((step.move + shrink * np.asarray(step.before, "float64")) * delta).sum()) / size if size else 0.0
    if not k or not fits(step, k, shrink):
        return ""
    rate, own = (step.lr or 1.0) * step.lr_scale, norm(step.move)
    why = ""
    if abs(own - rate) < ALIKE * rate:
        why = ": its update was divided by its own norm"
    elif abs(k - step.before.size**0.5) < ALIKE * k:
        why = ": by the root of its size"
    elif rates := [g["lr"] for g in groups if g.get("lr") and abs(k * (step.lr or 1.0) - g["lr"]) < ALIKE * g["lr"]]:
        why = f": by the rate of another group, {rates[0]!r}"
    return f"moved {k:.4g} times as far as the page{why}" if k > 0 else f"moved {-k:.4g} times as far, uphill"


def find_shrinkage(step: Step) -> str:
    """How many times as far, and how much of the tensor is taken off besides, in words."""
    decay: Any = getattr(step.rule, "weight_decay", 0.0)
    none = step.with_options(weight_decay=0.0) if decay else step
    before, delta = np.asarray(step.before, "float64").ravel(), np.asarray(none.page.delta, "float64").ravel()
    if not before.any() or not np.isfinite(delta).all() or not delta.any():
        return ""
    (k, shrink), *_ = np.linalg.lstsq(np.stack([delta, -before], 1), step.move.ravel(), rcond=None)
    if not fits(none, float(k), float(shrink)):
        return ""
    rate = (step.lr or 1.0) * step.lr_scale
    return (
        f"moved {k:.4g} times as far as the page without decay, with a decay of {shrink / rate:.4g} (page: {decay:g})"
    )


def find_nearest(step: Step) -> str:
    """The page that comes closest, by direction."""
    best, told = 0.0, ""
    for words, changed, _ in [("as the page", step, 0.0), *other_pages(step)]:
        if is_computable(changed) and (size := norm(np.asarray(changed.page.delta)) * norm(step.move)):
            cosine = float((np.asarray(changed.page.delta) * step.move).sum()) / size
            best, told = max((best, told), (cosine, words))
    return f"along none of our pages; the nearest is {told!r} (cosine {best:.4f})"
