"""Layouts, options and gradients that nobody thought of: the numbers of one process."""

from __future__ import annotations

import random

import pytest
from cases import CASES
from lanes import one_in

pytest.importorskip("torch")

from world import world
from world_layouts import SHAPES
from world_steps import RULES, Run, differences

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", one_in(20, range(40)))
def test_whatever_is_drawn(seed: int) -> None:
    draw = random.Random(seed)
    case = draw.choice([case for case in CASES if case.name in RULES])
    run = Run(
        case.name,
        options={
            **draw.choice(list(case.options.values())),
            **draw.choice(({}, {}, dict(max_grad_norm=2.0), dict(on_nonfinite="skip"), dict(maximize=True))),
        },
        engine=draw.choice(("auto", "auto", "foreach")),
        groups=draw.choice((({},), ({}, dict(weight_decay=0.2)))),
        gradients=draw.choice(("alike", "alike", "partial", "copies", "elsewhere")),
        absent={1: tuple(draw.sample(list(SHAPES), 3))},
        names=tuple(draw.sample(list(SHAPES), 8)),
        rates=(1.0, 0.5, 0.5),
    )
    assert world(4).run(differences, run, f"by chance {seed}") == [[]] * 4
