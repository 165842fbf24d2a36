"""Few collectives: one for each reduction and each dimension of a mesh that divides something, for the whole model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from lanes import by_turns, once, one_in

pytest.importorskip("torch")

from world import world
from world_layouts import LAYOUTS, SHAPES
from world_messages import EACH, GROUPS, messages
from world_steps import TYPICAL, Run, cases_for

pytestmark = pytest.mark.slow

#: And how many teams; as many as there are groups but for these.
TEAMS = {name: 1 for name, groups in GROUPS.items() if groups == 2} | {"meshes": 4}


def expected(rule: str, layout: str) -> dict[str, int]:
    groups = GROUPS.get(layout, 1)
    times = TEAMS.get(layout, groups) if rule in ("Muon", "Kron", "SOAP") else groups
    return {kind: count * times for kind, count in EACH[rule].items() if times}


def later_steps(size: int, run: Run, layout: str) -> list[dict[str, int]]:
    """What is sent after the first step, in which ranks make acquaintance; the same on every rank."""
    heard = world(size).run(messages, run, layout)
    assert all(own == heard[0] for own in heard)
    return heard[0][1:]  # type: ignore[no-any-return]


@by_turns("size")
@cases_for()
@pytest.mark.parametrize(
    ("size", "layout"), one_in(4, [(size, layout) for size, layouts in LAYOUTS.items() for layout in layouts], first=2)
)
def test_messages_of_a_step(rule: str, size: int, layout: str) -> None:
    """Where replicas do not divide their work."""
    run = Run(rule, options=dict(TYPICAL[rule], divide_work=False), rates=(1.0,) * 3)
    assert later_steps(size, run, layout) == [expected(rule, layout)] * 2


def test_norms_of_all_gradients_are_one_message_more() -> None:
    run = Run("Kron", options=dict(normalize_grads=True), rates=(1.0,) * 3)
    assert later_steps(2, run, "first axis") == [{"alltoall_base": 2, "allreduce": 1}] * 2


@by_turns("how", first=1)
@cases_for()
@pytest.mark.parametrize(
    "how",
    one_in(
        3,
        [
            dict(names=("matrix",)),
            dict(names=("vector", "matrix")),
            dict(names=tuple(SHAPES)),
            dict(groups=({}, dict(weight_decay=0.2), dict(lr=0.001))),
            dict(overrides=(("*e*", dict(lr_scale=0.5)), ("cube", dict(weight_decay=0.3)))),
            dict(absent=dict.fromkeys(range(3), ("matrix", "cube"))),
            dict(engine="foreach"),
            dict(dtype="float32"),
            dict(dtype="bfloat16"),
        ],
        first=2,
    ),
    ids=str,
)
def test_nothing_else_makes_more_of_them(rule: str, how: Mapping[str, Any]) -> None:
    run = Run(rule, **{"rates": (1.0,) * 3, **how})
    assert later_steps(2, run, "first axis") == [expected(rule, "first axis")] * 2


@once(2)
@cases_for()
def test_kinds_of_parameters_share_them(rule: str) -> None:
    """Rows and columns for some, whole squares for others, sums for each slice."""
    options = dict(TYPICAL[rule], **({"min_dim_size_to_factor": 5} if rule == "Adafactor" else {}))
    run = Run(rule, options=options, overrides=(("kernel", dict(stacked_axes=1)),), rates=(1.0,) * 3)
    wanted = expected(rule, "two axes")
    if rule == "Muon":  # a stack has its owners among those who share its slices
        wanted["alltoall_base"] += 2
    assert later_steps(4, run, "two axes") == [wanted] * 2


@by_turns("options", first=3)
@cases_for()
@pytest.mark.parametrize(("options", "more"), [(dict(max_grad_norm=1.0), 1), (dict(on_nonfinite="raise"), 1)], ids=str)
def test_what_guards_cost(rule: str, options: Mapping[str, Any], more: int) -> None:
    run = Run(rule, options=dict(TYPICAL[rule], **options), rates=(1.0,) * 3)
    wanted = expected(rule, "first axis")
    wanted["allreduce"] = wanted.get("allreduce", 0) + more
    assert later_steps(2, run, "first axis") == [wanted] * 2


@pytest.mark.parametrize("options", [{}, dict(max_grad_norm=1.0), dict(on_nonfinite="raise")], ids=str)
def test_rules_of_a_mixture_share_them(options: Mapping[str, Any]) -> None:
    """As many of each kind as the rule that needs most."""
    run = Run("kron_and_others", options=options, rates=(1.0,) * 3)
    wanted = expected("kron_and_others", "first axis")
    wanted["allreduce"] += bool(options)
    assert later_steps(2, run, "first axis") == [wanted] * 2
