"""Kernels for GPUs on what ranks hold of parameters: the passes of one device, with sums over ranks between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from lanes import by_turns, once, one_in
from tolerances import FLIPPED
from world import world
from world_kernels import by_owners
from world_layouts import LAYOUTS
from world_messages import EACH, GROUPS, messages
from world_repeated import times_sorted
from world_replicas import bits, explained
from world_steps import TYPICAL, Run, differences, differences_in_odd_memory, flipped

from thalweg import Spikes

pytestmark = pytest.mark.slow

#: Smaller than those of other engines' tests, and fewer: every program is interpreted.
NAMES = ("scalar", "short", "vector", "matrix", "even", "kernel")
every_rule = pytest.mark.parametrize("rule", ["LARS", "LAMB", "Adafactor"])


def run_of(
    rule: str, dtype: str = "float32", rates: tuple[float, ...] = (1.0, 0.5), names: Any = NAMES, **how: Any
) -> Run:
    return Run(rule, dtype, engine="fused", rates=rates, names=names, interpreted=True, **how)


@pytest.mark.parametrize(
    ("size", "layout"), one_in(24, [(size, layout) for size, layouts in LAYOUTS.items() for layout in layouts], first=2)
)
def test_every_layout_gives_the_numbers_of_one_process(size: int, layout: str) -> None:
    assert world(size).run(differences, run_of("LAMB"), layout) == [[]] * size


@once(1)
@pytest.mark.parametrize("rule", ["LARS", "Adafactor"])
@pytest.mark.parametrize(("size", "layout"), [(4, "two axes"), (2, "last axis"), (2, "first axis")])
def test_other_rules_on_some_layouts(rule: str, size: int, layout: str) -> None:
    assert world(size).run(differences, run_of(rule), layout) == [[]] * size


@pytest.mark.nightly
@pytest.mark.parametrize("rule", ["AdamW", "Adafactor"])
def test_each_tensor_is_judged_as_a_whole(rule: str) -> None:
    spikes = dict(tensor_spikes=Spikes(window=2, z=0.1, action="clip"))
    run = run_of(rule, rates=(1.0, 1.0, 0.5), names=NAMES[1:], options=spikes)
    assert world(2).run(differences, run, "mixed") == [[]] * 2


@once(1)
@pytest.mark.parametrize(("size", "layout"), [(2, "first axis"), (2, "last axis"), (2, "mixed"), (4, "two axes")])
def test_muon_around_its_owners(size: int, layout: str) -> None:
    """Kernels write momentum before owners transform it, and parameters then."""
    names = ("matrix", "even", "row", "column", "kernel")
    run = Run("Muon", "float32", engine="fused", rates=(1.0, 0.5, 0.25), names=names, interpreted=True)
    assert world(size).run(differences, run, layout) == [[]] * size


def replicas(rule: str = "Muon", **how: Any) -> Run:
    options = dict(TYPICAL[rule], divide_work=True, **how.pop("options", {}))
    names = ("matrix", "even", "row") if rule == "Muon" else ("vector", "matrix")
    given: dict[str, Any] = dict(rates=(1.0, 0.5, 0.25), names=names, interpreted=True, replicated=True, **how)
    return Run(rule, "float32", options, **given)


@pytest.mark.parametrize("slot", one_in(2, [40, None]))
@pytest.mark.parametrize(
    ("size", "layout"), one_in(3, [(2, "plain"), (4, "copies of copies"), (4, "copies of shards")])
)
def test_muon_around_the_owners_of_replicas(size: int, layout: str, slot: int | None) -> None:
    """Each replica writes all momentum, transforms its share, and writes what others have made."""
    answers = world(size).run(by_owners, replicas(slot=slot), layout)
    assert [(differences, engine) for differences, _, engine in answers] == [([], "fused")] * size


@pytest.mark.parametrize("rule", one_in(2, ["Kron", "Muon"]))
def test_replicas_stay_equal_to_the_bit(rule: str) -> None:
    first, second = world(2).run(bits, replicas(rule, slot=40), "plain")
    assert first["held"] == second["held"]


@pytest.mark.nightly
def test_replicas_decide_alike() -> None:
    run = replicas(options=dict(max_grad_norm=1.0), absent={1: ("even",)})
    assert [found for found, *_ in world(2).run(by_owners, run, "plain")] == [[]] * 2


def test_replicas_divide_nothing_that_lists_would_step() -> None:
    """Kernels step whole tensors faster than lists step their share."""
    how: dict[str, Any] = dict(names=("large",), rates=(1.0,), replicated=True, interpreted=True)
    told = "replicas do not divide the work on 1 parameter: fused kernels step it as a whole"
    for options, expected in ((dict(rounding="stochastic"), told), ({}, "replicas divide the work on 1 parameter")):
        for note in world(2).run(explained, Run("Muon", "bfloat16", options, **how), "plain"):
            assert expected in note


@pytest.mark.nightly
@once(2)
@every_rule
@pytest.mark.parametrize(("size", "layout"), [(2, "first axis"), (4, "two axes"), (2, "mixed")])
def test_messages_of_a_step(rule: str, size: int, layout: str) -> None:
    heard = world(size).run(messages, run_of(rule, rates=(1.0,) * 3), layout)
    groups = GROUPS.get(layout, 1)
    expected = {kind: count * groups for kind, count in EACH[rule].items()}
    assert all(own[1:] == [expected] * 2 for own in heard)


@by_turns("options", first=2)
@every_rule
@pytest.mark.parametrize(
    "options", one_in(3, [dict(on_nonfinite="skip"), dict(on_nonfinite="raise"), dict(max_grad_norm=0.5)]), ids=str
)
def test_what_is_decided_by_all_ranks(rule: str, options: Mapping[str, Any]) -> None:
    spoilt = ((0, "matrix", float("nan")),) if "on_nonfinite" in options else ()
    names = NAMES[1:]  # the moments of a lone number may cancel, and then have no digits left to compare
    run = run_of(rule, options=dict(TYPICAL[rule], **options), spoilt=spoilt, names=names)
    assert world(2).run(differences, run, "first axis") == [[]] * 2


@once(1)
@pytest.mark.parametrize("rule", ["LARS", "LAMB"])
@pytest.mark.parametrize(("size", "layout"), [(2, "first axis"), (2, "last axis"), (4, "first axis twice")])
def test_random_bits_are_those_of_the_place_in_the_whole(rule: str, size: int, layout: str) -> None:
    options = dict(trust=False, weight_decay=0.01, rounding="stochastic")
    run = run_of(rule, "bfloat16", options=options, rates=(0.01, 0.01))
    for shares in world(size).run(flipped, run, layout):
        assert all(share < FLIPPED for share in shares.values()), shares


@once(4)
@every_rule
def test_ranks_may_have_their_memory_in_another_order(rule: str) -> None:
    """All of them take the same engine, or they would wait for messages that never come."""
    assert world(2).run(differences_in_odd_memory, run_of(rule)) == [[]] * 2


def test_a_step_like_the_last_is_not_sorted_again() -> None:
    seen = world(2).run(times_sorted, run_of("LAMB", rates=(1.0,) * 3), "first axis")
    assert seen == [([0], [])] * 2


@pytest.mark.nightly
def test_shards_in_other_memory_are_noticed() -> None:
    seen = world(2).run(times_sorted, run_of("LAMB", rates=(1.0,) * 3), "first axis", 0)
    assert seen == [([0, 1], [])] * 2


@pytest.mark.nightly
def test_gradients_with_other_placements_are_sorted_every_time() -> None:
    seen = world(2).run(times_sorted, run_of("LAMB", rates=(1.0,) * 2, gradients="copies"), "first axis")
    assert seen == [([0, 1], [])] * 2
