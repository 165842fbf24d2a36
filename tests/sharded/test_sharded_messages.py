"""Few collectives: one for each reduction and each dimension of a mesh that divides something, for the whole model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from cases import EXACT
from lanes import by_day, one_in

pytest.importorskip("torch")

from world import world
from world_layouts import LAYOUTS, SHAPES
from world_messages import EACH, GROUPS, messages
from world_steps import RULES, TYPICAL, Run

pytestmark = pytest.mark.slow

WHOLE = ("Muon", "Kron", "SOAP")
#: And how many teams; as many as there are groups but for these.
TEAMS = {name: 1 for name, groups in GROUPS.items() if groups == 2} | {"meshes": 4}
THREE = (1.0,) * 3


def expected(rule: str, layout: str) -> dict[str, int]:
    groups = GROUPS.get(layout, 1)
    times = TEAMS.get(layout, groups) if rule in WHOLE else groups
    return {kind: count * times for kind, count in EACH[rule].items() if times}


def later_steps(size: int, run: Run, layout: str) -> list[dict[str, int]]:
    """What is sent after the first step, in which ranks make acquaintance; the same on every rank."""
    heard = world(size).run(messages, run, layout)
    assert all(own == heard[0] for own in heard)
    return heard[0][1:]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("rule", "size", "layout"),
    by_day(
        [
            ("LARS", 2, "copies"),
            ("LAMB", 2, "first axis"),
            ("MARS", 2, "mixed"),
            ("Adafactor", 4, "strided"),
            ("Muon", 4, "meshes"),
            ("Kron", 4, "two axes"),
        ],
        ((rule, size, layout) for rule in RULES for size, layouts in LAYOUTS.items() for layout in layouts),
    ),
)
def test_messages_of_a_step(rule: str, size: int, layout: str) -> None:
    """Where replicas do not divide their work."""
    run = Run(rule, options=dict(TYPICAL[rule], divide_work=False), rates=THREE)
    assert later_steps(size, run, layout) == [expected(rule, layout)] * 2


@pytest.mark.parametrize(
    ("rule", "size", "layout", "count"),
    by_day(
        [("Muon", 4, "copies of shards", 3), ("LAMB", 2, "plain", 0)],
        (
            *((rule, 4, "plain", 1) for rule in WHOLE),
            *((rule, 4, layout, 3) for rule in WHOLE for layout in ("copies of shards", "shards of copies")),
            ("LAMB", 2, "plain", 0),
        ),
    ),
)
def test_where_replicas_divide_their_work(rule: str, size: int, layout: str, count: int) -> None:
    """To owners within a replica and back, and then to all replicas; whole tensors need not travel to their owners."""
    run = Run(rule, options=dict(TYPICAL[rule], divide_work=True), replicated=True, rates=THREE)
    assert later_steps(size, run, layout) == [{"alltoall_base": count} if count else {}] * 2


#: What makes no more of them.
NOTHING_MORE: dict[str, dict[str, Any]] = {
    "one tensor": dict(names=("matrix",)),
    "all tensors": dict(names=tuple(SHAPES)),
    "groups": dict(groups=({}, dict(weight_decay=0.2), dict(lr=0.001))),
    "overrides": dict(overrides=(("*e*", dict(lr_scale=0.5)), ("cube", dict(weight_decay=0.3)))),
    "missing gradients": dict(absent=dict.fromkeys(range(3), ("matrix", "cube"))),
    "lists": dict(engine="foreach"),
    "float32": dict(dtype="float32"),
    "bfloat16": dict(dtype="bfloat16"),
}


@pytest.mark.parametrize(
    ("rule", "what"),
    by_day(
        [("SOAP", "groups"), ("Adafactor", "missing gradients"), ("LAMB", "bfloat16")],
        ((rule, what) for rule in RULES for what in NOTHING_MORE),
    ),
)
def test_nothing_else_makes_more_of_them(rule: str, what: str) -> None:
    run = Run(rule, **{"rates": THREE, **NOTHING_MORE[what]})
    assert later_steps(2, run, "first axis") == [expected(rule, "first axis")] * 2


@pytest.mark.parametrize("rule", one_in(7, RULES, first=4))
def test_kinds_of_parameters_share_them(rule: str) -> None:
    """Rows and columns for some, whole squares for others, sums for each slice."""
    options = dict(TYPICAL[rule], **({"min_dim_size_to_factor": 5} if rule == "Adafactor" else {}))
    run = Run(rule, options=options, overrides=(("kernel", dict(stacked_axes=1)),), rates=THREE)
    wanted = expected(rule, "two axes")
    if rule == "Muon":  # a stack has its owners among those who share its slices
        wanted["alltoall_base"] += 2
    assert later_steps(4, run, "two axes") == [wanted] * 2


#: What costs one sum more, for a rule or for a mixture, which has as many messages of each kind as its rule with most.
ONE_MORE = [dict(max_grad_norm=1.0), dict(on_nonfinite="raise")]


@pytest.mark.parametrize(
    ("rule", "options", "more"),
    [
        *(
            pytest.param(rule, {**TYPICAL.get(rule, {}), **guard}, 1, marks=() if by_day_too else pytest.mark.nightly)
            for rule in (*RULES, "kron_and_others")
            for guard in ONE_MORE
            for by_day_too in [rule == "kron_and_others" or (rule, *guard) == ("LARS", "max_grad_norm")]
        ),
        pytest.param("kron_and_others", {}, 0, marks=pytest.mark.nightly),
        ("Kron", dict(normalize_grads=True), 1),
        # around a rule, an average sends nothing, and a share of elements is one message for the whole model
        pytest.param("LAMB", dict(exempt=None, averaged=0.7), 0, marks=pytest.mark.nightly),
        pytest.param("LAMB", dict(exempt=None, cautious=True), 0, marks=pytest.mark.nightly),
        pytest.param("Muon", dict(EXACT, averaged=0.7), 0, marks=pytest.mark.nightly),
        ("Muon", dict(EXACT, cautious=True), 1),
    ],
    ids=str,
)
def test_what_options_cost(rule: str, options: Mapping[str, Any], more: int) -> None:
    wanted = expected(rule, "first axis")
    if more:
        wanted["allreduce"] = wanted.get("allreduce", 0) + more
    assert later_steps(2, Run(rule, options=options, rates=THREE), "first axis") == [wanted] * 2


@pytest.mark.nightly
@pytest.mark.parametrize("options", [dict(averaged=0.7), dict(cautious=True)], ids=str)
def test_adamw_sends_what_is_around_it_alone(options: Mapping[str, Any]) -> None:
    assert later_steps(2, Run("AdamW", options=options, rates=THREE), "first axis") == [{"allreduce": 1}] * 2


def in_slots(slot: int, **how: Any) -> Run:
    return Run("Muon", options=dict(TYPICAL["Muon"], divide_work=True), replicated=True, slot=slot, **how)


def test_slots() -> None:
    """Of six tensors each of two ranks owns some: there and back for every slot."""
    names = ("matrix", "even", "cube", "row", "column", "kernel")
    for slot, most in ((10**6, 1), (1, 3)):
        (second,) = later_steps(2, in_slots(slot, names=names, rates=(1.0, 1.0)), "first axis")
        assert most <= second["alltoall_base"] / 2 <= 2 * most - 1


def test_ranks_tell_their_layouts_once() -> None:
    """Tensors that have gradients by turns stay known."""
    absent: dict[int, tuple[str, ...]] = {0: ("even",), 1: ("matrix",), 2: ("even",), 3: ("matrix",)}
    run = in_slots(10**6, names=("matrix", "even"), rates=(1.0,) * 4, absent=absent)
    for first, second, *others in world(2).run(messages, run, "first axis"):
        assert all(set(step) > {"alltoall_base"} for step in (first, second))
        assert others == [{"alltoall_base": 2}] * 2
