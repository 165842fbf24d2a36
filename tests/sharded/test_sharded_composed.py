"""What is around a rule, over ranks: the numbers of one process, and as few messages as the sums need."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from cases import EXACT, UNIQUE
from world import world
from world_averages import faults_of_averages
from world_messages import messages
from world_steps import Run, differences

from thalweg.rules import AdamW, Spikes

pytestmark = pytest.mark.slow

RULES: dict[str, dict[str, Any]] = {
    "AdamW": dict(weight_decay=0.1),
    "LAMB": dict(weight_decay=0.1, exempt=None),
    "Adafactor": dict(min_dim_size_to_factor=2, weight_decay=0.1),
    "Muon": dict(EXACT, weight_decay=0.1),
    "Kron": dict(weight_decay=0.1),
    "SOAP": dict(UNIQUE, precondition_frequency=2, weight_decay=0.1),
}
AROUND: dict[str, dict[str, Any]] = {
    "cautious": dict(cautious=True),
    "averaged": dict(averaged=0.7),
    "grafted": dict(graft=AdamW()),
    "several": dict(cautious=True, averaged=0.7, graft=AdamW()),
    "schedule-free": dict(schedule_free=0.8),
    "spikes": dict(tensor_spikes=Spikes(window=2, z=0.1, action="clip")),
    "spikes of updates": dict(tensor_spikes=Spikes(window=2, z=0.1, action="clip", of="update")),
}
NO_MOMENTUM: dict[str, Any] = {
    **{name: dict(betas=(0.0, 0.9)) for name in ("AdamW", "LAMB", "SOAP")},
    **{"Muon": dict(momentum=0.0), "Kron": dict(momentum=0.0, whiten="gradient", momentum_mode="ema")},
}
DAY = [("Muon", "cautious"), ("Kron", "several"), ("AdamW", "spikes")]
CASES = [
    pytest.param(rule, what, marks=() if (rule, what) in DAY else pytest.mark.nightly)
    for rule in RULES
    for what in AROUND
]


def run_of(rule: str, what: str, **options: Any) -> Run:
    momentum = NO_MOMENTUM.get(rule, {}) if what == "schedule-free" else {}
    return Run(rule, "float64", {**RULES[rule], **momentum, **AROUND[what], **options}, rates=(1.0, 1.0, 0.5))


@pytest.mark.parametrize(("rule", "what"), CASES)
def test_sharded_is_unsharded(rule: str, what: str) -> None:
    assert world(2).run(differences, run_of(rule, what), "mixed") == [[]] * 2


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["two axes", "meshes"])
@pytest.mark.parametrize("rule", RULES)
def test_over_several_axes(rule: str, layout: str) -> None:
    assert world(4).run(differences, run_of(rule, "several"), layout) == [[]] * 4


EVALUATED = [("AdamW", "averaged"), ("Kron", "averaged"), ("AdamW", "schedule-free")]


@pytest.mark.parametrize(
    ("rule", "what"),
    [pytest.param(*each, marks=pytest.mark.nightly if index else ()) for index, each in enumerate(EVALUATED)],
)
def test_averages_are_evaluated(rule: str, what: str) -> None:
    assert world(2).run(faults_of_averages, run_of(rule, what), "first axis") == [[]] * 2


@pytest.mark.parametrize(
    ("rule", "what", "each"),
    [
        pytest.param("LAMB", "averaged", {"allreduce": 1}, marks=pytest.mark.nightly),
        ("LAMB", "cautious", {"allreduce": 1}),
        pytest.param("AdamW", "averaged", {"allreduce": 1}, marks=pytest.mark.nightly),
        pytest.param("AdamW", "cautious", {"allreduce": 1}, marks=pytest.mark.nightly),
        pytest.param("Muon", "averaged", {"alltoall_base": 2}, marks=pytest.mark.nightly),
        pytest.param("Muon", "cautious", {"alltoall_base": 2, "allreduce": 1}, marks=pytest.mark.nightly),
    ],
)
def test_an_average_sends_nothing_and_a_share_one_message_for_the_whole_model(rule: str, what: str, each: Any) -> None:
    for found in world(2).run(messages, run_of(rule, what), "first axis"):
        assert found[-1] == each


@pytest.mark.parametrize(
    ("rule", "layout"),
    [("LAMB", "mixed"), pytest.param("Muon", "mixed", marks=pytest.mark.nightly), ("Kron", "first axis")],
)
def test_gradients_are_accumulated_shard_by_shard(rule: str, layout: str) -> None:
    """After two steps with the means of two, and half of a third."""
    options = {**RULES[rule], "accumulate": 2, "max_grad_norm": 0.5}
    run = Run(rule, "float64", options, rates=(1.0,) * 5, absent={2: ("matrix",)})
    assert world(2).run(differences, run, layout) == [[]] * 2
