"""Whole tensors and their owners: the numbers of one process, in slots and narrow messages, by replicas too."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")

from lanes import by_day
from world import world
from world_layouts import MANY, SHAPES, torch
from world_messages import messages
from world_owners import bits, bytes_sent, dtypes_sent, errors_without_a_gradient, explained, peak_of_a_step
from world_steps import RULES, TYPICAL, Run, differences

import thalweg.torch
from thalweg.errors import OptionError
from thalweg.rules.whole import slots_of

pytestmark = pytest.mark.slow

WHOLE = ("Muon", "Kron", "SOAP")
#: Whole on every rank as plain tensors or as DTensors, in shards of which others have copies, and in shards alone.
LAYOUTS = [
    *((2, layout) for layout in ("plain", "mixed", "first axis")),
    *((4, layout) for layout in ("plain", "copies of copies", "copies of shards", "shards of copies")),
    *((4, layout) for layout in ("meshes", "two axes")),
]


def divided(rule: str, **how: Any) -> Run:
    """Replicas divide the work."""
    options = dict(TYPICAL.get(rule, {}), divide_work=True, **how.pop("options", {}))
    return Run(rule, options=options, replicated=True, **how)


def check(run: Run, size: int, layout: str) -> None:
    assert world(size).run(differences, run, layout) == [[]] * size


@pytest.mark.parametrize(
    ("rule", "size", "layout", "dtype", "slot"),
    by_day(
        [
            ("Muon", 2, "plain", "float64", None),
            ("Kron", 2, "mixed", "float64", 60),
            ("SOAP", 2, "plain", "float32", 60),
            ("kron_and_others", 2, "first axis", "float64", 60),
            ("Kron", 4, "copies of shards", "float64", None),
            ("Muon", 4, "meshes", "float32", 60),
        ],
        (
            (rule, size, layout, dtype, slot)
            for rule in (*WHOLE, "kron_and_others")
            for size, layout in LAYOUTS
            for dtype in ("float64", "float32")
            for slot in (None, 60)
        ),
    ),
)
def test_the_numbers_of_one_process(rule: str, size: int, layout: str, dtype: str, slot: int | None) -> None:
    """slot: elements that an owner receives at a time."""
    check(divided(rule, dtype=dtype, slot=slot), size, layout)


GUARDS: dict[str, dict[str, Any]] = {
    "clipped": dict(max_grad_norm=1.0),
    "skip": dict(on_nonfinite="skip"),
    "raise": dict(on_nonfinite="raise"),
}


@pytest.mark.parametrize(
    ("rule", "what", "size", "layout", "slot"),
    by_day(
        [
            ("Muon", "skip", 2, "plain", 60),
            ("SOAP", "raise", 2, "plain", None),
            ("Kron", "clipped", 4, "copies of shards", None),
        ],
        (
            (rule, what, size, layout, slot)
            for rule in WHOLE
            for what in GUARDS
            for size, layout in ((2, "plain"), (4, "copies of shards"))
            for slot in (None, 60)
        ),
    ),
)
def test_options(rule: str, what: str, size: int, layout: str, slot: int | None) -> None:
    spoilt, absent = ((1, "matrix", math.nan),), {2: ("cube",)}
    check(divided(rule, options=GUARDS[what], spoilt=spoilt, absent=absent, slot=slot), size, layout)


def test_more_ranks_than_tensors() -> None:
    """A rank without work still answers."""
    check(divided("Muon", names=("matrix",)), 2, "plain")


@pytest.mark.nightly
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("layout", [*MANY, "plain"])
def test_eight_ranks(rule: str, layout: str) -> None:
    check(divided(rule), 8, layout)


@pytest.mark.parametrize(
    ("rule", "size", "layout"),
    by_day(
        [("Kron", 2, "plain"), ("Muon", 4, "copies of shards")],
        (
            (rule, size, layout)
            for rule in WHOLE
            for size, layout in ((2, "plain"), (4, "plain"), (4, "copies of shards"))
        ),
    ),
)
def test_replicas_stay_equal_to_the_bit_and_each_transforms_its_share(rule: str, size: int, layout: str) -> None:
    run = divided(rule, dtype="float32")
    found = world(size).run(bits, run, layout)
    for place in found[0]["held"]:
        blocks = dict(own["held"][place] for own in found)
        assert all(own["held"][place] == (block, blocks[block]) for own in found for block in [own["held"][place][0]])
    sizes = [math.prod(SHAPES[name]) for name in run.names if SHAPES[name]]
    # what has no axes every rank does by itself
    assert sum(own["elements"] for own in found) == len(run.rates) * (sum(sizes) + len(found))
    assert all(own["elements"] for own in found)


@pytest.mark.nightly
def test_new_values_of_two_slots_exist_at_once() -> None:
    """Of 64 tensors, eight in a slot; where nothing may be written before all is known, those of all."""
    (bounded, held), (whole, _), (guarded, _) = (
        world(2).run(peak_of_a_step, *given)[0] for given in ((8 * 64**2,), (64 * 64**2,), (8 * 64**2, "raise"))
    )
    assert bounded < 0.5 * whole
    assert guarded > held > bounded


def test_slots() -> None:
    """No owner gets more than fits, unless one tensor is larger; all owners begin together."""
    tensors = [(0, 5), (1, 9), (0, 5), (0, 6), (1, 1), (0, 4), (0, 4)]
    assert slots_of(tensors, 10) == [[0, 1, 2, 4], [3, 5], [6]]
    assert slots_of(tensors, 1) == [[0, 1], [2, 4], [3], [5], [6]]
    assert slots_of([], 10) == []


# ---- when replicas divide the work


def test_off_where_it_does_not_pay() -> None:
    run = Run("Muon", "float32", dict(weight_decay=0.0), names=("matrix", "large"), replicated=True, rates=(1.0, 1.0))
    told = "replicas divide the work on 1 parameter; replicas do not divide the work on 1 parameter: messages would"
    for note in world(2).run(explained, run, "plain"):
        assert all(part in note for part in told.split("; "))
    assert world(2).run(messages, run, "plain")[0][1:] == [{"alltoall_base": 1}]
    forbidden = replace(run, options=dict(divide_work=False))
    assert world(2).run(messages, forbidden, "plain")[0] == [{}] * 2
    assert "divide_work=False" in world(2).run(explained, forbidden, "plain")[0]


def test_a_gradient_that_is_missing_on_one_rank_is_told() -> None:
    for (error,) in world(2).run(errors_without_a_gradient, divided("Muon", names=("matrix", "large"), rates=(1.0,))):
        assert "ranks differ in what they step" in error
        assert "'large'" in error
        assert "without a gradient" in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(replicas="all"), "replicas must be a process group, such as torch.distributed.group.WORLD, got 'all'"),
        (dict(divide_work="yes"), "divide_work must be True, False or None, got 'yes'"),
        (dict(divide_work=True, engine="fused"), "divide_work=True cannot be combined with engine='fused'"),
    ],
    ids=str,
)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        thalweg.torch.Muon([torch.nn.Parameter(torch.ones(3, 3))], lr=0.1, **options)


# ---- Muon with products in bfloat16, and its stacks


def muon(**how: Any) -> Run:
    options = dict(weight_decay=0.01, **how.pop("options", {}))
    names = ("row", "column", "matrix", "even", "cube", "kernel")
    return Run("Muon", "float32", options, **{"names": names, "rates": (1.0, 0.5), **how})


def experts(**how: Any) -> Run:
    options = dict(TYPICAL["Muon"], stacked_axes=1, **how.pop("options", {}))
    return Run("Muon", options=options, names=("cube", "experts"), **how)


BLOCKS = (("even", dict(split=(3, 1))), ("cube", dict(split=(1, 2), transposed=True, stacked_axes=1)))
CUT = [(2, "mixed"), (2, "last axis"), (4, "two axes"), (4, "strided")]
#: Of five experts the last rank of four has none.
ALONG = [(2, "first axis"), (4, "first axis"), (4, "two axes"), (4, "copies of shards")]
MUON: dict[str, tuple[Run, list[tuple[int, str]]]] = {
    "products in bfloat16": (muon(), [(2, "mixed"), (4, "two axes")]),
    "Gram iterations, by whole shapes": (muon(options=dict(ns_method="auto")), [(2, "mixed")]),
    "blocks of unequal size, cut anywhere": (muon(overrides=BLOCKS), CUT),
    "figures of slices": (muon(options=dict(stacked_axes=1), names=("cube", "kernel")), [(2, "second axis")]),
    "experts": (experts(), ALONG),
    "experts, raise": (experts(options=dict(on_nonfinite="raise")), ALONG),
    "experts, clipped": (experts(options=dict(max_grad_norm=1.0)), ALONG),
    "experts, skip": (experts(options=dict(on_nonfinite="skip"), spoilt=((1, "experts", math.nan),)), ALONG),
}


@pytest.mark.parametrize(
    ("what", "size", "layout"),
    by_day(
        [*((what, *layouts[0]) for what, (_, layouts) in MUON.items()), ("experts", 4, "first axis")],
        ((what, size, layout) for what, (_, layouts) in MUON.items() for size, layout in layouts),
    ),
)
def test_muon(what: str, size: int, layout: str) -> None:
    check(MUON[what][0], size, layout)


def test_experts_need_no_owner() -> None:
    assert world(4).run(messages, experts(), "first axis")[0][1:] == [{}] * 3
    # sharded along rows as well, those who share experts have owners
    assert world(4).run(messages, experts(), "two axes")[0][1:] == [{"alltoall_base": 2}] * 3


def test_messages_are_as_narrow_as_the_products() -> None:
    assert world(2).run(dtypes_sent, muon(rates=(1.0,)), "first axis") == [["torch.bfloat16"] * 2] * 2


@pytest.mark.nightly
def test_bytes_of_a_step() -> None:
    """Of P elements over w ranks at most 4 P / w bytes with Muon in bfloat16."""
    for sent, elements in world(4).run(bytes_sent, "Muon", (64, 128), 4):
        assert sent <= elements
