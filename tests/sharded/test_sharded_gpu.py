"""Kernels for GPUs, interpreted, on what ranks hold: the numbers of one process, with sums and owners between them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from tolerances import FLIPPED, SPACE
from world import world
from world_messages import EACH, counts
from world_steps import TYPICAL, Run, differences, flipped, told

pytestmark = pytest.mark.slow

#: Smaller than those of other engines' tests, and fewer: every program is interpreted.
NAMES = ("scalar", "short", "vector", "matrix", "even", "kernel")
FEW = ("matrix", "even", "row")


def run_of(rule: str, dtype: str = "float32", **how: Any) -> Run:
    options = dict(TYPICAL.get(rule, {}), **how.pop("options", {}))
    given: dict[str, Any] = {"engine": "fused", "rates": (1.0, 0.5), "names": NAMES, **how}
    return Run(rule, dtype, options, interpreted=True, **given)


def kron(*names: str, **how: Any) -> Run:
    """Factors are refreshed in the second step of three."""
    how["options"] = dict(precond_update_probability=0.5, **how.get("options", {}))
    return run_of("Kron", rates=(1.0, 1.0, 0.5), names=names, **how)


def check(run: Run, layout: str = "first axis", size: int = 2, engine: str = "fused") -> None:
    """That no rank finds a difference to one process, and that kernels stepped it."""
    assert world(size).run(differences, run, layout, SPACE["float32"], engine=engine) == [[]] * size


#: The moments of a lone number may cancel, and then have no digits left to compare.
SKIPPING: dict[str, Any] = dict(options=dict(on_nonfinite="skip"), spoilt=((0, "matrix", math.nan),), names=NAMES[1:])
#: Kernels write momentum before owners transform it, and parameters then.
MUON = run_of("Muon", rates=(1.0, 0.5, 0.25), names=(*FEW, "column", "kernel"))
#: Each replica writes all momentum, transforms its share, and writes what others have made.
REPLICAS = replace(run_of("Muon", options=dict(divide_work=True), names=FEW), engine="auto", replicated=True)
#: Nothing of a step that may not be taken is left with the owner: the next one refreshes, and finds the factors.
KRON_SKIPPING = dict(options=dict(on_nonfinite="skip", init_scale=1.0), spoilt=((1, "matrix", math.nan),))
ALWAYS = (("matrix", dict(precond_update_probability=1.0)),)
RUNS: dict[str, tuple[Run, str]] = {
    "Adafactor": (run_of("Adafactor"), "last axis"),
    "LARS, skip": (run_of("LARS", **SKIPPING), "first axis"),
    "LAMB, shards in other memory": (run_of("LAMB", rates=(1.0,) * 3, events={0: "exchanged"}), "first axis"),
    # all ranks take the same engine, or they would wait for messages that never come
    "LAMB, in odd memory": (run_of("LAMB", names=FEW), "odd memory"),
    "Muon": (MUON, "last axis"),
    "Muon, replicas": (replace(REPLICAS, slot=40), "plain"),
    # a vector, a matrix with two dense factors and one with a dense and a diagonal one
    "Kron, by rows": (kron("vector", "matrix", "even", engine="auto"), "first axis"),
    "Kron, skip": (kron("vector", "matrix", **KRON_SKIPPING), "first axis"),
    "Kron, state is loaded": (kron("matrix", events={0: "reloaded"}), "first axis"),
    # what was refreshed in it is forgotten, by owners too
    "Kron, refused by a scaler": (kron("matrix", overrides=ALWAYS, events={1: "refused"}), "first axis"),
}


@pytest.mark.parametrize("what", RUNS)
def test_the_numbers_of_one_process(what: str) -> None:
    check(*RUNS[what])


def test_lists_forget_what_a_scaler_refuses() -> None:
    run = replace(kron("matrix", overrides=ALWAYS, events={1: "refused"}), engine="foreach")
    check(run, engine="foreach")


@pytest.mark.parametrize("rule", ["LAMB", "Kron"])
def test_messages_of_a_step(rule: str) -> None:
    run = run_of(rule, rates=(1.0, 1.0), names=("vector", "even"))
    assert [heard[1:] for heard in world(2).run(counts, run, "first axis")] == [[EACH[rule]]] * 2


def test_random_bits_are_those_of_the_place_in_the_whole() -> None:
    options = dict(trust=False, weight_decay=0.01, rounding="stochastic")
    for shares in world(2).run(flipped, run_of("LAMB", "bfloat16", options=options, rates=(0.01, 0.01)), "last axis"):
        assert all(share < FLIPPED for share in shares.values()), shares


def test_tensors_without_kernels() -> None:
    """Others of the same step have some, and who insists is told why not."""
    eq = dict(geometry="eq")
    check(kron("vector", "matrix", overrides=(("matrix", eq),), engine="auto"), engine="foreach + fused")
    ((first, *_), _), _ = world(2).run(told, kron("matrix", options=eq), "first axis")
    assert first == (
        "OptionError: engine='fused' cannot run for parameter 'matrix': there is no fused kernel for geometry='eq', "
        "which solves triangular systems; use engine='auto', which takes the fastest engine that can run"
    )
