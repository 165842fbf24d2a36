"""Every option of every rule over ranks: the numbers of one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from cases import EXACT, OPTION_IDS, OPTIONS, Case
from lanes import by_turns, once, one_in

pytest.importorskip("torch")

from world import world
from world_steps import Run, cases_for, differences

pytestmark = pytest.mark.slow

SHARDED_OPTIONS = [
    pytest.param(case, options, id=name) for (case, _, options), name in zip(OPTIONS, OPTION_IDS, strict=True)
]


def check(run: Run, layout: str, size: int = 2) -> None:
    """That no rank finds a difference to one process."""
    assert world(size).run(differences, run, layout) == [[]] * size


@pytest.mark.parametrize(("case", "options"), one_in(20, SHARDED_OPTIONS))
def test_options_of_rules(case: Case, options: Mapping[str, Any]) -> None:
    check(Run(case.name, options=options), "last axis")


@pytest.mark.parametrize(("case", "options"), one_in(30, SHARDED_OPTIONS, first=9))
def test_options_of_rules_over_two_axes(case: Case, options: Mapping[str, Any]) -> None:
    check(Run(case.name, options=options, rates=(1.0, 0.5)), "two axes", 4)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_what_all_ranks_keep_has_all_its_digits_beside_messages_in_bfloat16(dtype: str) -> None:
    check(Run("Muon", dtype, options=dict(normalize="rows", vectors="row")), "first axis")


@pytest.mark.parametrize(
    "options", [dict(block_size=4, max_skew=None, merge=None), dict(normalize_grads=True)], ids=str
)
def test_options_of_kron(options: Mapping[str, Any]) -> None:
    check(Run("Kron", options=options), "mixed")


@by_turns("engine", "dtype")
@cases_for()
@pytest.mark.parametrize("engine", ["reference", "foreach", "auto"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_engines(rule: str, engine: str, dtype: str) -> None:
    check(Run(rule, dtype, engine=engine), "mixed")


@by_turns("options", "size", first=1)
@cases_for()
@pytest.mark.parametrize(
    "options",
    one_in(
        2,
        [
            dict(maximize=True),
            dict(max_grad_norm=0.5),
            dict(max_grad_norm=1e6),
            dict(on_nonfinite="skip"),
            dict(on_nonfinite="raise"),
            dict(on_nonfinite="skip", max_grad_norm=0.5),
            dict(on_nonfinite="raise", max_grad_norm=0.5),
            dict(state_dtype="float32"),
            dict(seed=7),
        ],
    ),
    ids=str,
)
@pytest.mark.parametrize(("size", "layout"), [(2, "mixed"), (4, "two axes"), (4, "meshes")])
def test_options_of_steps(rule: str, options: Mapping[str, Any], size: int, layout: str) -> None:
    typical = {"Adafactor": dict(min_dim_size_to_factor=2), "Muon": EXACT}.get(rule, {})
    check(Run(rule, options={**typical, **options}, rates=(1.0, 0.5)), layout, size)


@by_turns("kind", first=2)
@cases_for()
@pytest.mark.parametrize("kind", ["momentum_dtype", "state_dtype"])
def test_state_of_16_bits(rule: str, kind: str) -> None:
    # one step from values that are the same to the bit: later ones would round to neighbours now and then
    momentum: dict[str, Any] = {"Adafactor": dict(momentum=0.9, min_dim_size_to_factor=2), "Muon": EXACT}.get(rule, {})
    check(Run(rule, options={**momentum, kind: "bfloat16"}, rates=(1.0,)), "mixed")


@by_turns("layout", first=3)
@cases_for()
@pytest.mark.parametrize("layout", ["mixed", "first axis"])
def test_groups_with_options_of_their_own(rule: str, layout: str) -> None:
    momentum = {"LAMB": dict(betas=(0.5, 0.9))}.get(rule, dict(momentum=0.5))
    groups = ({}, dict(weight_decay=0.3), dict(lr=0.001, **momentum))
    check(Run(rule, groups=groups), layout)


@once(4)
@cases_for()
def test_overrides(rule: str) -> None:
    overrides = (("*e*", dict(weight_decay=0.2)), ("matrix", dict(lr_scale=0.1)), ("kernel", dict(stacked_axes=1)))
    check(Run(rule, overrides=overrides), "mixed")
    check(Run(rule, overrides=overrides), "two axes", 4)


STACKED = tuple(name for name in ("row", "column", "matrix", "even", "cube", "kernel"))


@by_turns("stacked_axes", "size", first=5)
@cases_for()
@pytest.mark.parametrize("stacked_axes", [1, 2])
@pytest.mark.parametrize(
    ("size", "layout"),
    [(2, "first axis"), (2, "second axis"), (2, "last axis"), (4, "two axes"), (4, "first axis twice")],
)
def test_stacked_axes_that_are_divided(rule: str, stacked_axes: int, size: int, layout: str) -> None:
    """Some of these divide the stacked axis, so that each rank has slices of its own, or none."""
    names = STACKED if stacked_axes == 1 else STACKED[-2:]
    options = {"Adafactor": dict(min_dim_size_to_factor=2), "Muon": EXACT}.get(rule, {})
    check(Run(rule, options=dict(options, stacked_axes=stacked_axes), names=names), layout, size)


@by_turns("kind", "size", first=6)
@cases_for()
@pytest.mark.parametrize("kind", ["partial", "copies", "elsewhere"])
@pytest.mark.parametrize(
    ("size", "layout"), [(2, "first axis"), (2, "mixed"), (4, "two axes"), (4, "strided"), (4, "copies of shards")]
)
def test_gradients_that_are_laid_out_otherwise(rule: str, kind: str, size: int, layout: str) -> None:
    check(Run(rule, gradients=kind), layout, size)


@by_turns("one_by_one", first=7)
@cases_for()
@pytest.mark.parametrize("one_by_one", [False, True])
def test_rates_that_are_tensors(rule: str, one_by_one: bool) -> None:
    check(Run(rule, tensor_rate=True, one_by_one=one_by_one), "mixed")


@by_turns("layout", first=8)
@cases_for()
@pytest.mark.parametrize("layout", ["first axis", "mixed"])
def test_parameters_stepped_one_by_one(rule: str, layout: str) -> None:
    check(Run(rule, one_by_one=True), layout)


@by_turns("size", first=9)
@cases_for()
@pytest.mark.parametrize(("size", "layout"), [(2, "first axis"), (4, "meshes")])
def test_parameters_without_gradients(rule: str, size: int, layout: str) -> None:
    absent = {0: ("matrix", "vector"), 1: ("matrix", "scalar"), 3: ("large",)}
    check(Run(rule, absent=absent), layout, size)


def test_learning_rate_of_adafactor_that_nobody_chose() -> None:
    check(Run("Adafactor", rates=(1.0,) * 4, own_rate=True), "mixed")
