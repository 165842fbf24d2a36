"""Steps over ranks have the numbers of one process: parameters, state, figures and errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("hypothesis")

import strategies
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from world import world
from world_layouts import SHAPES
from world_steps import EXACT, TYPICAL, Run, differences, in_one_process, told

import thalweg.rules
from thalweg.rules import AdamW, Spikes

pytestmark = pytest.mark.slow


def check(run: Run, layout: str, size: int = 2, **how: Any) -> None:
    """That no rank finds a difference to one process."""
    assert world(size).run(differences, run, layout, **how) == [[]] * size


@pytest.mark.parametrize(
    ("rule", "size", "layout", "dtype", "engine"),
    [
        ("LARS", 2, "first axis", "float64", "reference"),
        ("LAMB", 2, "mixed", "float32", "auto"),
        ("LAMB", 2, "mixed", "float64", "fused"),
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
)
def test_layouts(rule: str, size: int, layout: str, dtype: str, engine: str) -> None:
    check(Run(rule, dtype, engine=engine), layout, size)


@pytest.mark.parametrize(("rule", "layout"), [("LAMB", "first axis"), ("LARS", "odd memory")])
def test_native_code_steps_shards_by_default(rule: str, layout: str) -> None:
    """Also those that are not contiguous on one of the ranks."""
    check(Run(rule), layout, engine="fused")


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_ranks_choose_engines_alike_whatever_their_memory(rounding: str) -> None:
    """Else they would wait for messages that never come."""
    run = Run("LAMB", "bfloat16", dict(rounding=rounding), names=("matrix", "even"))
    first, second = world(2).run(told, run, "odd memory")
    assert first == second


#: Of those that have rows.
MATRICES = ("matrix", "even", "cube", "kernel")


def test_a_rule_of_ones_own_that_needs_whole_tensors() -> None:
    check(Run("Centred", names=MATRICES), "mixed")
    check(Run("Measured", names=MATRICES), "mixed")
    for (first, *_), _ in world(2).run(told, Run("InOnePart", names=MATRICES), "first axis"):
        assert "InOnePart needs whole tensors, and parameter 'matrix' is sharded: derive the rule from" in first


#: What rounds, so that sums in another order may be seen.
WITHOUT = ("state_dtype", "momentum_dtype", "precond_dtype", "state_rounding", "rounding", "compile")


@settings(max_examples=max(1, settings.default.max_examples // 8), phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(data=st.data())
def test_whatever_is_drawn(data: Any) -> None:
    """Rules, options, layouts and gradients that nobody thought of, over four ranks."""
    rule = data.draw(st.sampled_from(sorted(thalweg.rules.RULES)))
    fixed = {name: option for name, option in EXACT.items() if rule == "Muon"}
    options = data.draw(strategies.options(thalweg.rules.RULES[rule], most=3, without=WITHOUT, **fixed))
    names = data.draw(st.lists(st.sampled_from(list(SHAPES)), min_size=2, max_size=6, unique=True))
    run = Run(
        rule,
        options={name: option for name, option in options.items() if name != "lr"},
        engine=data.draw(st.sampled_from(("auto", "foreach"))),
        groups=data.draw(st.sampled_from((({},), ({}, dict(weight_decay=0.2))))),
        gradients=data.draw(st.sampled_from(("alike", "partial", "copies", "elsewhere"))),
        absent={1: tuple(data.draw(st.lists(st.sampled_from(names), max_size=2)))},
        names=tuple(names),
        rates=(1.0, 0.5, 0.5),
    )
    check(run, f"by chance {data.draw(st.integers(0, 99))}", 4)


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


def spiked(action: Any) -> Callable[[str], Run]:
    """What is large is on one rank, and all of them skip or clip."""
    options = dict(spikes=Spikes(window=4, z=3.0, action=action))
    return lambda rule: Run(rule, options={**TYPICAL[rule], **options}, rates=(1.0,) * 5, spoilt=((3, "matrix", 1e4),))


ABSENT = {0: ("matrix", "vector"), 1: ("matrix", "scalar"), 3: ("large",)}
#: By what is done: the run of a rule, the rule, and the layout; some divide the stacked axis, so that each rank has
#: slices of its own, or none.
WAYS: dict[str, tuple[Callable[[str], Run], str, str]] = {
    "maximize": (beside(maximize=True), "LARS", "mixed"),
    "clipped": (beside(max_grad_norm=0.5), "LAMB", "mixed"),
    "below the norm": (beside(max_grad_norm=1e6), "MARS", "mixed"),
    "skip": (beside(on_nonfinite="skip"), "Adafactor", "mixed"),
    "raise": (beside(on_nonfinite="raise"), "Muon", "mixed"),
    "skip and clipped": (beside(on_nonfinite="skip", max_grad_norm=0.5), "Kron", "mixed"),
    "raise and clipped": (beside(on_nonfinite="raise", max_grad_norm=0.5), "SOAP", "mixed"),
    "state in float32": (beside(state_dtype="float32"), "LARS", "mixed"),
    "another seed": (beside(seed=7), "LAMB", "mixed"),
    "momentum in bfloat16": (narrow("momentum_dtype"), "Muon", "mixed"),
    "state in bfloat16": (narrow("state_dtype"), "Adafactor", "mixed"),
    "factors in bfloat16": (lambda rule: Run(rule, options=dict(precond_dtype="bfloat16")), "Kron", "mixed"),
    "groups": (with_groups, "Muon", "mixed"),
    "overrides": (with_overrides, "Kron", "mixed"),
    "stacked": (stacked(1), "SOAP", "second axis"),
    "stacked twice": (stacked(2), "LARS", "second axis"),
    "partial gradients": (lambda rule: Run(rule, gradients="partial"), "LAMB", "first axis"),
    "partial gradients over two axes": (lambda rule: Run(rule, gradients="partial"), "Muon", "two axes"),
    "copied gradients": (lambda rule: Run(rule, gradients="copies"), "MARS", "first axis"),
    "gradients elsewhere": (lambda rule: Run(rule, gradients="elsewhere"), "Adafactor", "first axis"),
    "a rate in a tensor": (lambda rule: Run(rule, tensor_rate=True), "Muon", "mixed"),
    "one by one": (lambda rule: Run(rule, one_by_one=True), "Kron", "first axis"),
    "one by one by a tensor": (lambda rule: Run(rule, tensor_rate=True, one_by_one=True), "SOAP", "mixed"),
    "without gradients": (lambda rule: Run(rule, absent=ABSENT), "MARS", "meshes"),
    "two dtypes": (lambda rule: Run(rule, narrow=("matrix", "vector")), "LAMB", "first axis"),
    "nan, skip": (spoilt(math.nan, "skip"), "LAMB", "last axis"),
    "nan, raise": (spoilt(math.nan, "raise"), "MARS", "last axis"),
    "inf, skip": (spoilt(math.inf, "skip"), "Adafactor", "mixed"),
    "inf, propagate": (spoilt(math.inf, "propagate"), "Muon", "last axis"),
    "overflow, skip": (overflowing("skip"), "LAMB", "first axis"),
    "overflow, raise": (overflowing("raise"), "Adafactor", "first axis"),
    "spikes, clip": (spiked("clip"), "LAMB", "mixed"),
    "spikes, skip": (spiked("skip"), "Muon", "first axis"),
    # what all ranks keep has all its digits beside messages in bfloat16
    "rows normalized": (lambda rule: Run(rule, options=dict(normalize="rows", vectors="row")), "Muon", "first axis"),
    "blocks": (lambda rule: Run(rule, options=dict(block_size=4, max_skew=None, merge=None)), "Kron", "mixed"),
    "a rate of its own": (lambda rule: Run(rule, rates=(1.0,) * 4, own_rate=True), "Adafactor", "mixed"),
}


@pytest.mark.parametrize("what", WAYS)
def test_ways_to_step(what: str) -> None:
    run, rule, layout = WAYS[what]
    check(run(rule), layout, 4 if layout in ("meshes", "two axes") else 2)


@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_parameters_that_overflow_on_one_rank(policy: str) -> None:
    """The gradient is finite everywhere, and what would be written is not: float16 ends at 65504."""
    options = dict(trust=False, momentum=0.0, on_nonfinite=policy)
    run = Run("LARS", "float16", options=options, spoilt=((1, "matrix", 60000.0),), names=("matrix", "even"))
    check(run, "first axis", tolerance=0.0)


def test_spikes_are_met() -> None:
    """Or the tests above would show nothing of them."""
    for what, skipped in (("spikes, skip", 1), ("spikes, clip", 0)):
        run, rule, _ = WAYS[what]
        clipped, plain = in_one_process(run(rule)), in_one_process(replace(run(rule), options=TYPICAL[rule]))
        assert clipped.optimizer.skipped == skipped
        assert any(bool((p != plain.params[name]).any()) for name, p in clipped.params.items())


# ---- what is around a rule


@pytest.mark.parametrize(
    ("rule", "options"),
    [("Muon", dict(EXACT, graft=AdamW())), ("Kron", dict(cautious=True, averaged=0.7, graft=AdamW()))],
    ids=["Muon", "Kron"],
)
def test_around_a_rule(rule: str, options: dict[str, Any]) -> None:
    check(Run(rule, options=dict(options, weight_decay=0.1), rates=(1.0, 1.0, 0.5)), "mixed")
