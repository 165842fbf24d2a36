"""Parameters of 16 bits and state of eight over ranks.

Random bits depend on seed, name, step and place in the whole tensor, so that chance is the same on any number of ranks,
and so are groups of codes. What a step computes element by element is then the same to the bit. Sums that ranks share
are made in another order, so that a trust ratio may differ in its last digit and with it, rarely, the neighbour to
which an element is rounded.
"""

from __future__ import annotations

from typing import Any

import pytest
from tolerances import FLIPPED

pytest.importorskip("torch")

from world import world
from world_steps import TYPICAL, Run, flipped, told

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("rule", "dtype", "rounding", "size", "layout"),
    [
        ("LARS", "bfloat16", "nearest", 2, "first axis"),
        ("LAMB", "float16", "stochastic", 2, "last axis"),
        ("LARS", "bfloat16", "stochastic", 2, "mixed"),
        ("LAMB", "bfloat16", "stochastic", 4, "strided"),
    ],
)
def test_the_same_bits_where_nothing_is_summed(rule: str, dtype: str, rounding: str, size: int, layout: str) -> None:
    options = dict(trust=False, weight_decay=0.01, rounding=rounding)
    for shares in world(size).run(flipped, Run(rule, dtype, options, rates=(0.01, 0.01, 0.001)), layout):
        assert not any(shares.values()), shares


@pytest.mark.parametrize(
    ("rule", "dtype", "rounding"),
    [("LAMB", "float16", "nearest"), ("Adafactor", "bfloat16", "stochastic"), ("Kron", "bfloat16", "stochastic")],
)
def test_few_bits_differ_where_sums_are_of_another_order(rule: str, dtype: str, rounding: str) -> None:
    run = Run(rule, dtype, dict(TYPICAL[rule], rounding=rounding), rates=(0.1, 0.1))
    for shares in world(2).run(flipped, run, "mixed"):
        assert shares["large"] < FLIPPED, shares


def test_chance_makes_a_difference() -> None:
    """What the tests above compare is not the same anyway."""
    seeds = [Run("LAMB", "bfloat16", dict(rounding="stochastic", seed=seed), rates=(1.0,)) for seed in (0, 1)]
    shares = world(2).run(flipped, seeds[0], "first axis", seeds[1])
    assert all(share["large"] > FLIPPED for share in shares), shares


# ---- state in eight bits: groups of codes are of places in the whole tensor

LEAN = dict(state_dtype="int8", state_rounding="stochastic")
CODED = ("coded", "coded kernel", "bias")


@pytest.mark.parametrize(
    ("run", "size", "layout"),
    [
        (Run("LAMB", "float32", LEAN, names=CODED), 2, "second axis"),
        (Run("LAMB", "float32", LEAN, names=CODED), 4, "two axes"),
        (Run("Kron", "float32", LEAN, names=CODED), 2, "first axis"),
        (Run("LAMB", "float32", LEAN, names=("coded",), interpreted=True, engine="fused"), 2, "first axis"),
    ],
    ids=["columns", "both", "Kron by rows", "kernels"],
)
def test_the_same_codes_in_every_layout(run: Run, size: int, layout: str) -> None:
    if run.interpreted:
        pytest.importorskip("triton")
    for shares in world(size).run(flipped, run, layout, alike=True):
        codes = {key: share for key, share in shares.items() if "." in key and (run.rule == "LAMB" or "mom" in key)}
        assert codes
        assert not any(codes.values()), codes


def test_a_shard_that_cuts_a_group_is_refused_on_every_rank() -> None:
    def run(name: str) -> Any:
        return world(2).run(told, Run("LAMB", "float32", LEAN, names=(name,), rates=(1.0,)), "second axis")

    for (error,), _ in run("cut"):
        assert "'cut' of shape (64, 192) is sharded with" in error
        assert "groups of 64" in error
        assert "state_dtype='bfloat16'" in error
    assert [errors for errors, _ in run("uncut")] == [[""]] * 2
