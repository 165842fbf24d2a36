"""Replicas divide the work on whole tensors: the numbers of one process, state that is whole and equal everywhere."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from lanes import by_turns, once, one_in
from world import world
from world_checkpoints import resume, save
from world_layouts import SHAPES, torch
from world_messages import messages
from world_replicas import bits, errors_without_a_gradient, explained, peak_of_a_step
from world_steps import TYPICAL, Run, cases_for, differences

import thalweg.torch
from thalweg.errors import OptionError

pytestmark = pytest.mark.slow

RULES = ("Muon", "Kron", "SOAP", "kron_and_others")
#: Whole on every rank as plain tensors or as DTensors, and in shards of which others have copies.
LAYOUTS = [(2, "plain"), (4, "plain"), (4, "copies of copies"), (4, "copies of shards"), (4, "shards of copies")]
MIXED = [(2, "mixed"), (4, "meshes")]


def divided(rule: str, **how: Any) -> Run:
    options = dict(TYPICAL.get(rule, {}), divide_work=True, **how.pop("options", {}))
    return Run(rule, options=options, replicated=True, **how)


@by_turns()
@cases_for(RULES)
@pytest.mark.parametrize(("size", "layout"), one_in(2, LAYOUTS + MIXED))
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_the_numbers_of_one_process(rule: str, size: int, layout: str, dtype: str) -> None:
    assert world(size).run(differences, divided(rule, dtype=dtype), layout) == [[]] * size


@by_turns("options", first=1)
@cases_for(RULES[:3])
@pytest.mark.parametrize(
    "options", [dict(max_grad_norm=1.0), dict(on_nonfinite="skip"), dict(on_nonfinite="raise")], ids=str
)
@pytest.mark.parametrize("layout", ["plain", "copies of shards"])
def test_options(rule: str, options: Mapping[str, Any], layout: str) -> None:
    run = divided(rule, options=options, spoilt=((1, "matrix", float("nan")),), absent={2: ("cube",)})
    assert world(4).run(differences, run, layout) == [[]] * 4


@by_turns("layout")
@cases_for(RULES[:3])
@pytest.mark.parametrize(("layout", "count"), [("plain", 1), ("copies of shards", 3), ("shards of copies", 3)])
def test_messages(rule: str, layout: str, count: int) -> None:
    """To owners within a replica and back, and then to all replicas; whole tensors need not travel to their owners."""
    for heard in world(4).run(messages, divided(rule, rates=(1.0,) * 3), layout):
        assert heard[1:] == [{"alltoall_base": count}] * 2


@by_turns("layout")
@cases_for(RULES[:3])
@pytest.mark.parametrize("layout", ["plain", "copies of shards"])
def test_replicas_stay_equal_to_the_bit_and_each_transforms_its_share(rule: str, layout: str) -> None:
    run = divided(rule, dtype="float32")
    found = world(4).run(bits, run, layout)
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


def test_more_ranks_than_tensors() -> None:
    """A rank without work still answers."""
    assert world(4).run(differences, divided("Muon", names=("matrix",)), "plain") == [[]] * 4


@once(1)
@cases_for(RULES[:3])
@pytest.mark.parametrize(
    ("before", "ranks", "after", "others"),
    [("DDP", 4, "plain", 1), ("HSDP", 4, "DDP", 2), ("DDP", 2, "HSDP", 4), ("HSDP", 4, "FSDP2", 2)],
)
def test_checkpoints(rule: str, before: str, ranks: int, after: str, others: int, tmp_path: Path) -> None:
    """Whole, the same for every number of ranks."""
    world(ranks).run(save, tmp_path, rule, before, divide_work=True)
    assert world(others).run(resume, tmp_path, rule, after, divide_work=True) == [[]] * others


# ---- when


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


def test_rules_that_need_no_whole_tensors_divide_nothing() -> None:
    assert world(2).run(messages, divided("LAMB", rates=(1.0,)), "plain") == [[{}]] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(replicas="all"), "replicas must be a process group, such as torch.distributed.group.WORLD, got 'all'"),
        (dict(divide_work="yes"), "divide_work must be True, False or None, got 'yes'"),
        (dict(divide_work=True, engine="fused"), "divide_work=True cannot be combined with engine='fused'"),
        (dict(divide_work=True, offload_state=True), "divide_work=True cannot be combined with offload_state=True"),
    ],
    ids=str,
)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        thalweg.torch.Muon([torch.nn.Parameter(torch.ones(3, 3))], lr=0.1, **options)
