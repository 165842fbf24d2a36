"""Steps over ranks have the numbers of one process: parameters, state, figures and errors.

By day, every way to step is tried once, by two ranks where four show nothing more; at night by every rule and layout.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from cases import CASES, EXACT, OPTION_IDS, OPTIONS, Case
from lanes import by_day, one_in

pytest.importorskip("torch")

from world import world
from world_layouts import LAYOUTS, SHAPES
from world_steps import (
    RULES,
    TYPICAL,
    Run,
    differences,
    differences_untraced,
    engine_told,
    faults_of_averages,
    in_one_process,
    stepped_errors,
)

from thalweg.rules import AdamW, Spikes

pytestmark = pytest.mark.slow

NIGHT = pytest.mark.nightly


def check(run: Run, layout: str, size: int = 2) -> None:
    """That no rank finds a difference to one process."""
    assert world(size).run(differences, run, layout) == [[]] * size


# ---- layouts


@pytest.mark.parametrize(
    ("rule", "size", "layout", "dtype", "engine"),
    by_day(
        [
            ("LARS", 2, "first axis", "float64", "reference"),
            ("LAMB", 2, "mixed", "float32", "auto"),
            ("MARS", 2, "last axis", "float64", "foreach"),
            ("Adafactor", 2, "second axis", "float64", "auto"),
            ("Muon", 2, "mixed", "float64", "auto"),
            ("Kron", 2, "first axis", "float64", "auto"),
            ("SOAP", 2, "third axis", "float64", "auto"),
            ("kron_and_others", 2, "mixed", "float64", "auto"),
            ("Layerwise", 2, "first axis", "float64", "foreach"),
            ("LAMB", 4, "meshes", "float64", "auto"),
            ("Adafactor", 4, "two axes", "float64", "auto"),
            ("Kron", 4, "strided", "float32", "auto"),
        ],
        (
            (rule, size, layout, dtype, engine)
            for rule in (*RULES, "kron_and_others", "Layerwise")
            for size, layouts in LAYOUTS.items()
            for layout in layouts
            for dtype, engine in (
                ("float64", "auto"),
                ("float32", "auto"),
                ("float64", "foreach"),
                ("float64", "reference"),
            )
        ),
    ),
)
def test_layouts(rule: str, size: int, layout: str, dtype: str, engine: str) -> None:
    check(Run(rule, dtype, engine=engine), layout, size)


@pytest.mark.parametrize(
    ("rule", "size", "layout"),
    by_day(
        [("LAMB", 2, "mixed")],
        (
            (rule, *laid_out)
            for rule in ("LARS", "LAMB", "Layerwise")
            for laid_out in ((2, "first axis"), (2, "mixed"), (4, "two axes"))
        ),
    ),
)
def test_native_code_by_name(rule: str, size: int, layout: str) -> None:
    check(Run(rule, engine="fused"), layout, size)


@pytest.mark.parametrize("rule", one_in(2, ["LAMB", "LARS"]))
def test_native_code_steps_shards_by_default(rule: str) -> None:
    """Also those that are not contiguous on one of the ranks."""
    for layout in ("first axis", "odd memory"):
        assert world(2).run(engine_told, Run(rule), layout) == [("fused", [])] * 2


@pytest.mark.parametrize("rule", one_in(3, ["LARS", "LAMB", "Adafactor"], first=2))
@pytest.mark.parametrize("options", one_in(2, [{}, dict(on_nonfinite="raise")], first=1), ids=str)
def test_rules_that_cannot_be_traced(rule: str, options: dict[str, str]) -> None:
    """Each bucket then sends messages of its own."""
    run = Run(rule, options=dict(TYPICAL[rule], **options))
    assert world(2).run(differences_untraced, run, "first axis") == [[]] * 2


#: Of those that have rows.
MATRICES = ("matrix", "even", "cube", "kernel")


def test_a_rule_of_ones_own_that_needs_whole_tensors() -> None:
    check(Run("Centred", names=MATRICES), "mixed")
    check(Run("Measured", names=MATRICES), "mixed")
    for first, *_ in world(2).run(stepped_errors, Run("InOnePart", names=MATRICES), "first axis"):
        assert "InOnePart needs whole tensors, and parameter 'matrix' is sharded: derive the rule from" in first


@pytest.mark.parametrize("seed", one_in(40, range(40)))
def test_whatever_is_drawn(seed: int) -> None:
    """Layouts, options and gradients that nobody thought of."""
    draw = random.Random(seed)
    case = draw.choice([case for case in CASES if case.name in RULES])
    run = Run(
        case.name,
        options={
            **draw.choice(list(case.options.values())),
            **draw.choice(({}, {}, dict(max_grad_norm=2.0), dict(on_nonfinite="skip"), dict(maximize=True))),
        },
        engine=draw.choice(("auto", "auto", "foreach")),
        groups=draw.choice((({},), ({}, dict(weight_decay=0.2)))),
        gradients=draw.choice(("alike", "alike", "partial", "copies", "elsewhere")),
        absent={1: tuple(draw.sample(list(SHAPES), 3))},
        names=tuple(draw.sample(list(SHAPES), 8)),
        rates=(1.0, 0.5, 0.5),
    )
    check(run, f"by chance {seed}", 4)


# ---- options of rules


SHARDED_OPTIONS = [
    pytest.param(case, options, id=name) for (case, _, options), name in zip(OPTIONS, OPTION_IDS, strict=True)
]


@pytest.mark.parametrize(("case", "options"), one_in(30, SHARDED_OPTIONS))
def test_options_of_rules(case: Case, options: Mapping[str, Any]) -> None:
    check(Run(case.name, options=options), "last axis")


@NIGHT
@pytest.mark.parametrize(("case", "options"), SHARDED_OPTIONS)
def test_options_of_rules_over_two_axes(case: Case, options: Mapping[str, Any]) -> None:
    check(Run(case.name, options=options, rates=(1.0, 0.5)), "two axes", 4)


@pytest.mark.parametrize(
    ("run", "layout"),
    [
        # what all ranks keep has all its digits beside messages in bfloat16
        (Run("Muon", "float64", dict(normalize="rows", vectors="row")), "first axis"),
        pytest.param(Run("Muon", "float32", dict(normalize="rows", vectors="row")), "first axis", marks=NIGHT),
        (Run("Kron", options=dict(block_size=4, max_skew=None, merge=None)), "mixed"),
        pytest.param(Run("Kron", options=dict(normalize_grads=True)), "mixed", marks=NIGHT),
        (Run("Adafactor", rates=(1.0,) * 4, own_rate=True), "mixed"),
    ],
    ids=["rows normalized", "rows normalized in float32", "blocks", "normalized gradients", "a rate of its own"],
)
def test_options_of_one_rule(run: Run, layout: str) -> None:
    check(run, layout)


# ---- ways to step, for every rule


def beside(**options: Any) -> Callable[[str], Run]:
    """Two steps with an option that every rule has."""
    return lambda rule: Run(rule, options=dict(TYPICAL[rule], **options), rates=(1.0, 0.5))


def with_groups(rule: str) -> Run:
    momentum = {"LAMB": dict(betas=(0.5, 0.9))}.get(rule, dict(momentum=0.5))
    return Run(rule, groups=({}, dict(weight_decay=0.3), dict(lr=0.001, **momentum)))


def with_overrides(rule: str) -> Run:
    overrides = (("*e*", dict(weight_decay=0.2)), ("matrix", dict(lr_scale=0.1)), ("kernel", dict(stacked_axes=1)))
    return Run(rule, overrides=overrides)


def stacked(axes: int) -> Callable[[str], Run]:
    names = ("row", "column", "matrix", "even", "cube", "kernel")[0 if axes == 1 else -2 :]
    return lambda rule: Run(rule, options=dict(TYPICAL[rule], stacked_axes=axes), names=names)


def narrow(kind: str) -> Callable[[str], Run]:
    """One step from values that are the same to the bit: later ones would round to neighbours now and then."""
    return lambda rule: Run(rule, options={**TYPICAL[rule], kind: "bfloat16"}, rates=(1.0,))


def spoilt(number: float, policy: str) -> Callable[[str], Run]:
    where = ((1, "matrix", number), (2, "vector", number), (2, "large", number))
    return lambda rule: Run(rule, options=dict(TYPICAL[rule], on_nonfinite=policy), spoilt=where)


def overflowing(policy: str) -> Callable[[str], Run]:
    """Squares overflow in the sum of all ranks alone: each rank can still square what it has."""
    names = ("even", "vector")
    guarded = dict(on_nonfinite=policy, max_grad_norm=1.0)
    return lambda rule: Run(rule, "float32", dict(TYPICAL[rule], **guarded), names=names, huge=(1, "even", 8e18))


FIRST, MIXED, STEPPED = ["first axis"], ["mixed"], ["mixed", "two axes", "meshes"]
#: Some of these divide the stacked axis, so that each rank has slices of its own, or none.
STACKED = ["second axis", "first axis", "last axis", "two axes", "first axis twice"]
OTHERWISE = ["first axis", "mixed", "two axes", "strided", "copies of shards"]
SPOILT = ["last axis", "first axis", "mixed", "two axes", "meshes"]
ABSENT = {0: ("matrix", "vector"), 1: ("matrix", "scalar"), 3: ("large",)}
#: By what is done: the run of a rule, and its layouts.
WAYS: dict[str, tuple[Callable[[str], Run], list[str]]] = {
    "maximize": (beside(maximize=True), STEPPED),
    "clipped": (beside(max_grad_norm=0.5), STEPPED),
    "below the norm": (beside(max_grad_norm=1e6), STEPPED),
    "skip": (beside(on_nonfinite="skip"), STEPPED),
    "raise": (beside(on_nonfinite="raise"), STEPPED),
    "skip and clipped": (beside(on_nonfinite="skip", max_grad_norm=0.5), STEPPED),
    "raise and clipped": (beside(on_nonfinite="raise", max_grad_norm=0.5), STEPPED),
    "state in float32": (beside(state_dtype="float32"), STEPPED),
    "another seed": (beside(seed=7), STEPPED),
    "momentum in bfloat16": (narrow("momentum_dtype"), MIXED),
    "state in bfloat16": (narrow("state_dtype"), MIXED),
    "groups": (with_groups, [*MIXED, *FIRST]),
    "overrides": (with_overrides, ["mixed", "two axes"]),
    "stacked": (stacked(1), STACKED),
    "stacked twice": (stacked(2), STACKED),
    "partial gradients": (lambda rule: Run(rule, gradients="partial"), OTHERWISE),
    "copied gradients": (lambda rule: Run(rule, gradients="copies"), OTHERWISE),
    "gradients elsewhere": (lambda rule: Run(rule, gradients="elsewhere"), OTHERWISE),
    "a rate in a tensor": (lambda rule: Run(rule, tensor_rate=True), MIXED),
    "one by one": (lambda rule: Run(rule, one_by_one=True), [*FIRST, *MIXED]),
    "one by one by a tensor": (lambda rule: Run(rule, tensor_rate=True, one_by_one=True), MIXED),
    "without gradients": (lambda rule: Run(rule, absent=ABSENT), ["first axis", "meshes"]),
    "nan, skip": (spoilt(math.nan, "skip"), SPOILT),
    "nan, raise": (spoilt(math.nan, "raise"), SPOILT),
    "inf, skip": (spoilt(math.inf, "skip"), SPOILT[2:]),
    "inf, propagate": (spoilt(math.inf, "propagate"), SPOILT),
    "overflow, skip": (overflowing("skip"), FIRST),
    "overflow, raise": (overflowing("raise"), FIRST),
}
#: By day each of them, in the first of its layouts, for one rule after the other; the same by four ranks for two.
DAY = [(what, RULES[place % len(RULES)], layouts[0]) for place, (what, (_, layouts)) in enumerate(WAYS.items())]
DAY += [("without gradients", "MARS", "meshes"), ("partial gradients", "Muon", "two axes")]


@pytest.mark.parametrize(
    ("what", "rule", "layout"),
    by_day(DAY, ((what, rule, layout) for what, (_, layouts) in WAYS.items() for rule in RULES for layout in layouts)),
)
def test_ways_to_step(what: str, rule: str, layout: str) -> None:
    check(WAYS[what][0](rule), layout, 2 if layout in LAYOUTS[2] else 4)


@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_parameters_that_overflow_on_one_rank(policy: str) -> None:
    """The gradient is finite everywhere, and what would be written is not: float16 ends at 65504."""
    options = dict(trust=False, momentum=0.0, on_nonfinite=policy)
    run = Run("LARS", "float16", options=options, spoilt=((1, "matrix", 60000.0),), names=("matrix", "even"))
    assert world(2).run(differences, run, "first axis", tolerance=0.0) == [[]] * 2


@pytest.mark.parametrize(
    ("rule", "layout", "action"),
    by_day(
        [("LAMB", "mixed", "clip"), ("Muon", "first axis", "skip")],
        ((*ruled, action) for ruled in (("LAMB", "mixed"), ("Muon", "first axis")) for action in ("skip", "clip")),
    ),
)
def test_spikes_on_one_rank(rule: str, layout: str, action: Any) -> None:
    """What is large is on one rank, and all of them skip or clip."""
    spikes = Spikes(window=4, z=3.0, action=action)
    run = Run(rule, options=dict(TYPICAL[rule], spikes=spikes), rates=(1.0,) * 5, spoilt=((3, "matrix", 1e4),))
    assert in_one_process(run).optimizer.skipped == (1 if action == "skip" else 0)
    check(run, layout)


# ---- what is around a rule: by day where nothing has to be compiled for it


AROUND: dict[str, dict[str, Any]] = {
    "cautious": dict(cautious=True),
    "averaged": dict(averaged=0.7),
    "grafted": dict(graft=AdamW()),
    "several": dict(cautious=True, averaged=0.7, graft=AdamW()),
    "schedule-free": dict(schedule_free=0.8),
}
INSIDE: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "LAMB": dict(exempt=None),
    "Adafactor": dict(min_dim_size_to_factor=2),
    "Muon": EXACT,
    "Kron": {},
    "SOAP": dict(precondition_frequency=2),
}
NO_MOMENTUM: dict[str, Any] = {
    **{name: dict(betas=(0.0, 0.9)) for name in ("AdamW", "LAMB", "SOAP")},
    **{"Muon": dict(momentum=0.0), "Kron": dict(momentum=0.0, whiten="gradient", momentum_mode="ema")},
}


def composed(rule: str, what: str) -> Run:
    momentum = NO_MOMENTUM.get(rule, {}) if what == "schedule-free" else {}
    options = {"weight_decay": 0.1, **INSIDE[rule], **momentum, **AROUND[what]}
    last = 1.0 if what == "schedule-free" else 0.5  # which takes the place of a schedule
    return Run(rule, options=options, rates=(1.0, 1.0, last))


@pytest.mark.parametrize(
    ("rule", "what", "layout"),
    by_day(
        [("Muon", "grafted", "mixed"), ("Kron", "several", "mixed")],
        (
            (rule, what, layout)
            for rule in INSIDE
            for what in AROUND
            for layout in (("mixed", "two axes", "meshes") if what == "several" else MIXED)
        ),
    ),
)
def test_around_a_rule(rule: str, what: str, layout: str) -> None:
    check(composed(rule, what), layout, 2 if layout == "mixed" else 4)


@pytest.mark.parametrize(
    ("rule", "what"), one_in(3, [("Kron", "averaged"), ("AdamW", "averaged"), ("AdamW", "schedule-free")])
)
def test_averages_are_evaluated(rule: str, what: str) -> None:
    assert world(2).run(faults_of_averages, composed(rule, what), "first axis") == [[]] * 2
