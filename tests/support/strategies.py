"""Options, shapes and dtypes drawn at random, from what fields say of themselves: there is no table of options by hand.

A field knows its type, its choices and its range, so that a new rule is tested by having fields.
"""

from __future__ import annotations

import typing
from collections.abc import Collection, Iterable
from dataclasses import fields
from typing import Any

import numpy as np
from hypothesis import strategies as st

import thalweg.numpy
from thalweg.dtypes import DTYPES
from thalweg.errors import OptimError
from thalweg.rules import AROUND, AdamW, Rule, Spikes
from thalweg.rules.options import Option, alternatives, choices_of, hints_of, options_of
from thalweg.settings import Numerics
from thalweg.spaces import numpy as space
from thalweg.storage import first_state

#: Lengths of axes: nothing, one, odd ones, enough for codes of eight bits, more than a vector of any processor.
AXES = (0, 1, 2, 3, 7, 16, 33, 64)
MOST_ELEMENTS = 10_000
#: Options whose types say too little to draw from, with values of each kind.
OBJECTS: dict[str, tuple[Any, ...]] = {
    "graft": (None, AdamW(weight_decay=0.1)),
    "spikes": (False, Spikes(window=2, quantile=0.1, action="clip")),
    "ns_coefficients": ("polar_express", (3.0, -4.0, 2.0), ((3.0, -4.0, 2.0), (2.0, -1.5, 0.5))),
    "split": (1, 2),
    "betas": (),
}


def numbers(known: Option, default: Any) -> list[float]:
    """Numbers of an option: the ends that belong to its range, some around its default, and some between the ends."""
    low = known.low if known.above is None else known.above
    high = known.high if known.below is None else known.below
    usual = float(default) if isinstance(default, (int, float)) and default else 0.1
    found = {usual * factor for factor in (0.3, 1.0, 3.0)}
    if low is not None and high is not None:
        found |= {low + (high - low) * share for share in (0.1, 0.5, 0.99)}
    found |= {float(end) for end in (known.low, known.high) if end is not None}
    return [
        number
        for number in sorted(found)
        if (low is None or number > low or number == known.low)
        and (high is None or number < high or number == known.high)
    ]


def values_of(name: str, hint: Any, known: Option, default: Any) -> st.SearchStrategy[Any]:
    """What an option may be."""
    if OBJECTS.get(name):
        return st.sampled_from(OBJECTS[name])
    found: list[st.SearchStrategy[Any]] = []
    for kind in alternatives(hint):
        if choices := choices_of(kind):
            found.append(st.sampled_from(choices))
        elif known.is_range:
            found.append(st.sampled_from([(0.0, 2.0), (0.1, 10.0), (1.0, float("inf"))]))
        elif typing.get_origin(kind) is tuple:
            count = len(typing.get_args(kind))
            parts = default if isinstance(default, tuple) else (default,) * count
            found.append(st.tuples(*(st.sampled_from(numbers(known, part)) for part in parts)))
        elif kind is int:
            least = int(known.low or 0)
            found.append(st.integers(least, least + 5))
        elif known.ends or kind is float:
            found.append(st.sampled_from(numbers(known, default)))
    return st.one_of(found) if found else st.just(default)


#: Values of which a field says too little.
MORE: dict[str, Any] = {
    "eps": 100.0,
    "alpha_warmup": 4,
    "beta3_warmup": 4,
    "schedule_free_warmup": 4,
    "averaged_warmup": True,
    "state_rounding": "stochastic",
    "momentum_mode": "polyak",
}


def candidates(kind: Any, option: str, default: Any) -> list[Any]:
    """Some values that an option of a class may have beside its default."""
    known = options_of(kind)[option]
    if OBJECTS.get(option):
        return [value for value in OBJECTS[option] if value != default]
    found: list[Any] = []
    found += [MORE[option]] if option in MORE and not isinstance(default, tuple) else []
    for each in alternatives(hints_of(kind)[option]):
        if known.is_range:
            found += [(0.0, 0.5), (1.5, 3.0)]
        elif isinstance(default, tuple):
            found += [tuple(values) for values in zip(*(numbers(known, part) for part in default), strict=False)]
        elif each in (int, float) or not choices_of(each):
            found += [1, 3] if each is int else numbers(known, default)
        else:
            found += choices_of(each)
    return [value for value in found if value != default]


def one_by_one(rule: type[Rule], **beside: Any) -> list[dict[str, Any]]:
    """What is beside; and each option of a rule with each of some values, with that and what it needs."""
    found = [beside]
    for f in fields(rule):
        if f.name not in options_of(rule) or f.name in (*beside, "stacked_axes"):
            continue
        need = options_of(rule)[f.name].need
        needed = {need.option: need.value} if need is not None and need.relation == "=" else {}
        for value in candidates(rule, f.name, f.default):
            given = {**beside, **needed, f.name: value}
            try:
                rule(**given).validate()
            except OptimError:
                continue
            found.append(given)
    return found


def values_by_name(*kinds: Any) -> dict[str, st.SearchStrategy[Any]]:
    """A strategy for each option of a rule, of what is around rules, or of all optimizers."""
    return {
        f.name: values_of(f.name, hints_of(kind)[f.name], options_of(kind)[f.name], f.default)
        for kind in kinds
        for f in fields(kind)
        if f.name in options_of(kind)
    }


@st.composite
def options(
    draw: Any, rule: type[Rule], *, around: bool = True, most: int = 6, without: Collection[str] = (), **fixed: Any
) -> dict[str, Any]:
    """Some options of an optimizer that go together, beside those that are fixed: all that ``thalweg.numpy`` takes.

    around: whether options around the rule and those of all optimizers are among them. most: at most so many.
    """
    table = values_by_name(rule, *((Numerics, *AROUND) if around else ()))
    make = thalweg.numpy.optimizer(rule)
    usual = rule.typical_lr or rule.default_lr or 0.01
    drawn = {"lr": draw(st.sampled_from([usual, 0.1 * usual])), **fixed}
    names = sorted(table.keys() - {"stacked_axes", *fixed, *without})
    for name in draw(st.lists(st.sampled_from(names), unique=True, max_size=most)):
        tried = {**drawn, name: draw(table[name])}
        try:
            make(**tried)
        except OptimError:
            continue  # it does not go with those before, or needs one that is not among them
        drawn = tried
    return drawn


def takes(rule: Rule, shape: tuple[int, ...]) -> bool:
    """Whether a rule steps parameters of this shape."""
    try:
        rule.check_shape("p", shape)
        first_state(space, rule.for_shape(shape), Numerics(), np.zeros(shape, "float32"))
    except OptimError:
        return False
    return True


@st.composite
def shapes(draw: Any, rule: Rule, most: int = 3, axes: Iterable[int] = AXES) -> dict[str, tuple[int, ...]]:
    """Shapes of parameters by name, in the order that a tree has them in."""
    one = st.lists(st.sampled_from(list(axes)), max_size=4).map(tuple)
    one = one.filter(lambda shape: np.prod(shape) <= MOST_ELEMENTS and takes(rule, shape))
    return {f"p{place}": shape for place, shape in enumerate(draw(st.lists(one, min_size=1, max_size=most)))}


dtypes = st.sampled_from(list(DTYPES))
