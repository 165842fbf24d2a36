"""Whole tensors and their owners: the numbers of one process, in slots and narrow messages, by replicas too."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytest.importorskip("torch")

from world import world
from world_layouts import SHAPES
from world_messages import errors_without_a_gradient, held, transformed
from world_steps import TYPICAL, Run, differences

import thalweg.torch
from thalweg.errors import OptionError
from thalweg.rules.whole import slots_of

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow


def divided(rule: str, **how: Any) -> Run:
    """Replicas divide the work."""
    options = dict(TYPICAL.get(rule, {}), divide_work=True, **how.pop("options", {}))
    return Run(rule, options=options, replicated=True, **how)


def check(run: Run, size: int, layout: str) -> None:
    assert world(size).run(differences, run, layout) == [[]] * size


SPOILT: dict[str, Any] = dict(spoilt=((1, "matrix", math.nan),), absent={2: ("cube",)})


@pytest.mark.parametrize(
    ("run", "size", "layout"),
    [
        (divided("Muon"), 2, "plain"),
        (divided("Kron", slot=60), 2, "mixed"),
        (divided("SOAP", dtype="float32", slot=60), 2, "plain"),
        (divided("kron_and_others", slot=60), 2, "first axis"),
        (divided("Kron"), 4, "copies of shards"),
        (divided("Muon", dtype="float32", slot=60), 4, "meshes"),
        (divided("Muon", options=dict(on_nonfinite="skip"), slot=60, **SPOILT), 2, "plain"),
        (divided("SOAP", options=dict(on_nonfinite="raise"), **SPOILT), 2, "plain"),
        (divided("Kron", options=dict(max_grad_norm=1.0), **SPOILT), 4, "copies of shards"),
        # a rank without work still answers
        (divided("Muon", names=("matrix",)), 2, "plain"),
    ],
    ids=lambda value: f"{value.rule}-{value.dtype}-{value.slot}" if isinstance(value, Run) else str(value),
)
def test_the_numbers_of_one_process(run: Run, size: int, layout: str) -> None:
    """slot: elements that an owner receives at a time."""
    check(run, size, layout)


@pytest.mark.parametrize(("rule", "size", "layout"), [("Kron", 2, "plain"), ("Muon", 4, "copies of shards")])
def test_replicas_stay_equal_to_the_bit(rule: str, size: int, layout: str) -> None:
    found = world(size).run(held, divided(rule, dtype="float32"), layout)
    for place in found[0]:
        blocks = dict(entries[place] for entries in found)
        assert all(numbers == blocks[block] for block, numbers in (entries[place] for entries in found))


@pytest.mark.parametrize(("size", "layout"), [(2, "plain"), (4, "copies of shards")])
def test_each_replica_transforms_its_share(size: int, layout: str) -> None:
    run = divided("Counted", names=("matrix", "even", "cube", "kernel"))
    found = world(size).run(transformed, run, layout)
    assert sum(found) == (len(run.rates) - 1) * sum(math.prod(SHAPES[name]) for name in run.names)
    assert all(found)


def test_slots() -> None:
    """No owner gets more than fits, unless one tensor is larger; all owners begin together."""
    tensors = [(0, 5), (1, 9), (0, 5), (0, 6), (1, 1), (0, 4), (0, 4)]
    assert slots_of(tensors, 10) == [[0, 1, 2, 4], [3, 5], [6]]
    assert slots_of(tensors, 1) == [[0, 1], [2, 4], [3], [5], [6]]
    assert slots_of([], 10) == []


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
#: Of five experts the last rank of four has none.
MUON: dict[str, tuple[Run, int, str]] = {
    "products in bfloat16": (muon(), 2, "mixed"),
    "Gram iterations, by whole shapes": (muon(options=dict(ns_method="auto")), 2, "mixed"),
    "blocks of unequal size, cut anywhere": (muon(overrides=BLOCKS), 2, "mixed"),
    "figures of slices": (muon(options=dict(stacked_axes=1), names=("cube", "kernel")), 2, "second axis"),
    "experts": (experts(), 4, "first axis"),
    "experts, raise": (experts(options=dict(on_nonfinite="raise")), 2, "first axis"),
    "experts, clipped": (experts(options=dict(max_grad_norm=1.0)), 2, "first axis"),
    "experts, skip": (experts(options=dict(on_nonfinite="skip"), spoilt=((1, "experts", math.nan),)), 2, "first axis"),
}


@pytest.mark.parametrize("what", MUON)
def test_muon(what: str) -> None:
    check(*MUON[what])
