"""Parameters of 16 bits over ranks.

Random bits depend on seed, name, step and place in the whole tensor, so that chance is the same on any number of ranks.
What a step computes element by element is then the same to the bit. Sums that ranks share are made in another order, so
that a trust ratio may differ in its last digit and with it, rarely, the neighbour to which an element is rounded.
"""

from __future__ import annotations

from typing import Any

import pytest
from lanes import by_turns, one_in
from tolerances import FLIPPED

pytest.importorskip("torch")

from world import world
from world_layouts import LAYOUTS
from world_steps import RULES, TYPICAL, Run, flipped

pytestmark = pytest.mark.slow

ROUNDED = pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
NARROW = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])


def laid_out(*layouts: str) -> Any:
    """By day over two ranks alone."""
    sizes = [(2 if layout in LAYOUTS[2] else 4, layout) for layout in layouts]
    rows = [pytest.param(*each, marks=() if each[0] == 2 else pytest.mark.nightly) for each in sizes]
    return pytest.mark.parametrize(("size", "layout"), rows)


@by_turns()
@NARROW
@ROUNDED
@laid_out("first axis", "last axis", "mixed", "two axes", "first axis twice", "strided", "meshes")
@pytest.mark.parametrize("rule", ["LARS", "LAMB"])
def test_the_same_bits_where_nothing_is_summed(rule: str, dtype: str, rounding: str, size: int, layout: str) -> None:
    options = dict(trust=False, weight_decay=0.01, rounding=rounding)
    run = Run(rule, dtype, options=options, rates=(0.01, 0.01, 0.001))
    for shares in world(size).run(flipped, run, layout):
        assert not any(shares.values()), shares


@by_turns("rounding", first=1)
@pytest.mark.parametrize("rule", RULES)
@NARROW
@ROUNDED
@laid_out("mixed", "two axes", "strided")
def test_few_bits_differ_where_sums_are_of_another_order(
    rule: str, dtype: str, rounding: str, size: int, layout: str
) -> None:
    run = Run(rule, dtype, options=dict(TYPICAL[rule], rounding=rounding), rates=(0.1, 0.1))
    for shares in world(size).run(flipped, run, layout):
        assert shares["large"] < FLIPPED, shares


@pytest.mark.parametrize("rule", one_in(2, ["LARS", "LAMB"]))
def test_chance_makes_a_difference(rule: str) -> None:
    """What the tests above compare is not the same anyway."""
    seeds = [Run(rule, "bfloat16", options=dict(rounding="stochastic", seed=seed), rates=(1.0,)) for seed in (0, 1)]
    shares = world(2).run(flipped, seeds[0], "first axis", seeds[1])
    assert all(share["large"] > FLIPPED for share in shares), shares
