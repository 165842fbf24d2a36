"""A small transformer in torch's own wrappers: the training of one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from tolerances import WORLD_TRAINED

pytest.importorskip("torch")

from lanes import by_turns, once, one_in
from world import world
from world_steps import LR, TYPICAL, cases_for
from world_training import furthest, furthest_with_zero

pytestmark = pytest.mark.slow

WRAPPED = pytest.mark.parametrize(
    ("size", "wrapper"),
    one_in(
        2,
        [
            (2, "DDP"),
            (2, "FSDP2"),
            (2, "FSDP2, offloaded"),
            (2, "tensor parallel"),
            (4, "FSDP2"),
            (4, "tensor parallel"),
            (4, "HSDP"),
            (4, "FSDP2 over tensor parallel"),
        ],
    ),
)


def check(found: list[tuple[float, float]]) -> None:
    for losses, parameters in found:
        assert losses < WORLD_TRAINED
        assert parameters < WORLD_TRAINED


@by_turns()
@cases_for()
@WRAPPED
def test_wrappers(rule: str, size: int, wrapper: str) -> None:
    check(world(size).run(furthest, wrapper, rule, LR[rule], 1, TYPICAL[rule]))


@by_turns("wrapper", first=1)
@cases_for()
@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_gradients_that_add_up_over_pieces_of_a_batch(rule: str, wrapper: str) -> None:
    check(world(2).run(furthest, wrapper, rule, LR[rule], 2, TYPICAL[rule]))


@by_turns("size", "options", first=2)
@cases_for()
@pytest.mark.parametrize(
    ("size", "wrapper"), one_in(2, [(2, "FSDP2"), (4, "FSDP2 over tensor parallel"), (2, "tensor parallel")])
)
@pytest.mark.parametrize("options", [dict(max_grad_norm=0.1), dict(on_nonfinite="skip")], ids=str)
def test_guards(rule: str, size: int, wrapper: str, options: Mapping[str, Any]) -> None:
    check(world(size).run(furthest, wrapper, rule, LR[rule], 1, {**TYPICAL[rule], **options}))


@once(3)
@cases_for()
def test_zero_redundancy_optimizer(rule: str) -> None:
    # parameters have no names there, and noise goes by names
    noiseless = dict(damping_mode="expected") if rule == "Kron" else {}
    check(world(2).run(furthest_with_zero, rule, LR[rule], {**TYPICAL[rule], **noiseless}))
