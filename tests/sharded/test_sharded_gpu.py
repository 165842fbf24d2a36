"""Kernels for GPUs, interpreted, on what ranks hold: the numbers of one process, with sums and owners between them."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from lanes import by_day
from tolerances import FLIPPED
from world import world
from world_kernels import by_owners, times_sorted
from world_layouts import LAYOUTS
from world_messages import EACH, GROUPS, messages
from world_owners import bits, explained
from world_steps import (
    TYPICAL,
    Run,
    differences,
    differences_in_odd_memory,
    flipped,
    stepped_errors,
)

pytestmark = pytest.mark.slow

NIGHT = pytest.mark.nightly
#: Smaller than those of other engines' tests, and fewer: every program is interpreted.
NAMES = ("scalar", "short", "vector", "matrix", "even", "kernel")
#: The moments of a lone number may cancel, and then have no digits left to compare.
SOME = NAMES[1:]
FEW = ("matrix", "even", "row")
RULES = ("LARS", "LAMB", "Adafactor")


def run_of(rule: str, dtype: str = "float32", **how: Any) -> Run:
    options = dict(TYPICAL.get(rule, {}), **how.pop("options", {}))
    given: dict[str, Any] = {"engine": "fused", "rates": (1.0, 0.5), "names": NAMES, **how}
    return Run(rule, dtype, options, interpreted=True, **given)


def replicas(rule: str = "Muon", **how: Any) -> Run:
    """Each replica writes all momentum, transforms its share, and writes what others have made."""
    how["options"] = dict(divide_work=True, **how.get("options", {}))
    names = FEW if rule == "Muon" else ("vector", "matrix")
    return run_of(rule, **{"engine": "auto", "rates": (1.0, 0.5, 0.25), "names": names, "replicated": True, **how})


def muon() -> Run:
    """Kernels write momentum before owners transform it, and parameters then."""
    return run_of("Muon", rates=(1.0, 0.5, 0.25), names=(*FEW, "column", "kernel"))


def spoilt(policy: str) -> dict[str, Any]:
    return dict(options=dict(on_nonfinite=policy), spoilt=((0, "matrix", math.nan),), names=SOME)


GUARDED: dict[str, dict[str, Any]] = {
    "skip": spoilt("skip"),
    "raise": spoilt("raise"),
    "clipped": dict(options=dict(max_grad_norm=0.5), names=SOME),
}


@pytest.mark.parametrize(
    ("run", "size", "layout"),
    [
        pytest.param(run_of("Adafactor"), 2, "last axis", id="Adafactor"),
        pytest.param(run_of("LARS", **GUARDED["skip"]), 2, "first axis", id="LARS, skip"),
        pytest.param(muon(), 2, "last axis", id="Muon"),
        *(
            pytest.param(run_of("LAMB"), size, layout, marks=NIGHT, id=f"LAMB, {size}, {layout}")
            for size, layouts in LAYOUTS.items()
            for layout in layouts
        ),
        *(
            pytest.param(run_of(rule), size, layout, marks=NIGHT, id=f"{rule}, {size}, {layout}")
            for rule in ("LARS", "Adafactor")
            for size, layout in ((4, "two axes"), (2, "last axis"), (2, "first axis"))
        ),
        *(
            pytest.param(muon(), size, layout, marks=NIGHT, id=f"Muon, {size}, {layout}")
            for size, layout in ((2, "first axis"), (2, "mixed"), (4, "two axes"))
        ),
        *(
            pytest.param(run_of(rule, **how), 2, "first axis", marks=NIGHT, id=f"{rule}, {what}")
            for rule in RULES
            for what, how in GUARDED.items()
        ),
    ],
)
def test_the_numbers_of_one_process(run: Run, size: int, layout: str) -> None:
    assert world(size).run(differences, run, layout) == [[]] * size


@NIGHT
@pytest.mark.parametrize(("size", "layout"), [(2, "first axis"), (4, "two axes"), (2, "mixed")])
@pytest.mark.parametrize("rule", [*RULES, "Kron"])
def test_messages_of_a_step(rule: str, size: int, layout: str) -> None:
    names = ("vector", "even") if rule == "Kron" else NAMES
    heard = world(size).run(messages, run_of(rule, rates=(1.0,) * 3, names=names), layout)
    groups = min(1, GROUPS.get(layout, 1)) if rule == "Kron" else GROUPS.get(layout, 1)
    expected = {kind: count * groups for kind, count in EACH[rule].items()}
    assert all(own[1:] == [expected] * 2 for own in heard)


@pytest.mark.parametrize(
    ("rule", "size", "layout"),
    by_day(
        [("LAMB", 2, "last axis")],
        (
            (rule, *laid_out)
            for rule in ("LARS", "LAMB")
            for laid_out in ((2, "first axis"), (2, "last axis"), (4, "first axis twice"))
        ),
    ),
)
def test_random_bits_are_those_of_the_place_in_the_whole(rule: str, size: int, layout: str) -> None:
    options = dict(trust=False, weight_decay=0.01, rounding="stochastic")
    for shares in world(size).run(flipped, run_of(rule, "bfloat16", options=options, rates=(0.01, 0.01)), layout):
        assert all(share < FLIPPED for share in shares.values()), shares


@pytest.mark.parametrize("rule", [pytest.param(rule, marks=() if rule == "LAMB" else NIGHT) for rule in RULES])
def test_ranks_may_have_their_memory_in_another_order(rule: str) -> None:
    """All of them take the same engine, or they would wait for messages that never come."""
    assert world(2).run(differences_in_odd_memory, run_of(rule, names=FEW)) == [[]] * 2


@pytest.mark.parametrize(
    ("exchange_after", "gradients", "sorts"),
    [
        (None, "alike", [0]),
        pytest.param(0, "alike", [0, 1], marks=NIGHT),
        pytest.param(None, "copies", [0, 1, 2], marks=NIGHT),
    ],
    ids=["like the last", "shards in other memory", "gradients with other placements"],
)
def test_when_a_step_is_sorted_again(exchange_after: int | None, gradients: str, sorts: list[int]) -> None:
    run = run_of("LAMB", rates=(1.0,) * 3, gradients=gradients)
    assert world(2).run(times_sorted, run, "first axis", exchange_after) == [(sorts, [])] * 2


# ---- replicas


@pytest.mark.parametrize(
    ("size", "layout", "slot"),
    by_day(
        [(2, "plain", 40)],
        (
            (*laid_out, slot)
            for laid_out in ((2, "plain"), (4, "copies of copies"), (4, "copies of shards"))
            for slot in (40, None)
        ),
    ),
)
def test_muon_around_the_owners_of_replicas(size: int, layout: str, slot: int | None) -> None:
    answers = world(size).run(by_owners, replicas(slot=slot), layout)
    assert [(differences, engine) for differences, _, engine in answers] == [([], "fused")] * size


@NIGHT
@pytest.mark.parametrize("rule", ["Kron", "Muon"])
def test_replicas_stay_equal_to_the_bit(rule: str) -> None:
    first, second = world(2).run(bits, replicas(rule, slot=40), "plain")
    assert first["held"] == second["held"]


@NIGHT
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


# ---- Kron


def kron(*names: str, dtype: str = "float32", engine: str = "fused", **how: Any) -> Run:
    """Factors are refreshed in the second step of three."""
    how["options"] = dict(precond_update_probability=0.5, **how.get("options", {}))
    return run_of("Kron", dtype, engine=engine, rates=(1.0, 1.0, 0.5), names=names, **how)


def check(run: Run, layout: str = "first axis", size: int = 2, **how: Any) -> None:
    """That no rank finds a difference to one process, and that kernels whitened every tensor."""
    answers = world(size).run(by_owners, run, layout, **how)
    assert [differences for differences, _, _ in answers] == [[]] * size
    assert {name for _, batches, _ in answers for batch in batches for name in batch} == set(run.names)
    assert {engine for _, _, engine in answers} == {"fused"}


#: A vector, a matrix with two dense factors and one with a dense and a diagonal one.
KINDS = ("vector", "matrix", "even")
NAN = ((1, "matrix", math.nan),)
DIVIDED = kron(*KINDS, engine="auto", replicated=True, options=dict(divide_work=True))
EMA: dict[str, Any] = dict(momentum_mode="ema", whiten="momentum", clip_mode="rms", seed=3)
QUAD: dict[str, Any] = dict(geometry="quad", maximize=True, max_grad_norm=0.5, weight_decay_mode="decoupled")
KRON: dict[str, tuple[Run, str, int]] = {
    "by rows": (kron(*KINDS, engine="auto"), "first axis", 2),
    # nothing of a step that may not be taken is left with the owner: the next one refreshes, and finds the factors
    "skip": (kron("vector", "matrix", options=dict(on_nonfinite="skip", init_scale=1.0), spoilt=NAN), "first axis", 2),
    "by columns": (kron(*KINDS, engine="auto"), "last axis", 2),
    "two axes": (kron(*KINDS, engine="auto"), "two axes", 4),
    "replicas": (DIVIDED, "plain", 2),
    "copies of shards": (DIVIDED, "copies of shards", 4),
    "smaller factors": (kron("matrix", options=dict(momentum_mode="ema", max_size_dense=6)), "first axis", 2),
    "momentum whitened": (kron("matrix", options=EMA), "first axis", 2),
    "stacks": (kron("even", options=dict(stacked_axes=1, init_scale=None)), "first axis", 2),
    "quad": (kron("even", options=QUAD), "first axis", 2),
    "nan is let through": (kron("matrix", options=dict(init_scale=1.0), spoilt=NAN), "first axis", 2),
    "due at different steps": (kron("vector", "even", absent={0: ("even",)}), "first axis", 2),
}


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=() if what in ("by rows", "skip") else NIGHT) for what in KRON]
)
def test_kron(what: str) -> None:
    check(*KRON[what])


@NIGHT
def test_factors_of_16_bits_take_products_of_16_bits() -> None:
    """So these numbers are not the rule's, but those of the same kernels in one process."""
    run = kron("matrix", dtype="bfloat16", options=dict(precond_dtype="bfloat16"))
    check(run, beside_kernels=True)
    with pytest.raises(AssertionError, match=r"matrix\.L_0 differs"):
        check(run)


def test_state_that_was_loaded() -> None:
    check(kron("matrix"), event="state is loaded")


@pytest.mark.parametrize("engine", ["foreach", pytest.param("fused", marks=NIGHT)])
def test_a_step_that_a_scaler_refuses(engine: str) -> None:
    """What was refreshed in it is forgotten, by owners too."""
    run = kron("matrix", engine=engine, overrides=(("matrix", dict(precond_update_probability=1.0)),))
    for found, _, used in world(2).run(by_owners, run, "first axis", event="a step is refused"):
        assert (found, used) == ([], engine)


def test_tensors_without_kernels() -> None:
    """Others of the same step have some; by other engines none has, and who insists is told why not."""
    run = kron("vector", "matrix", overrides=(("matrix", dict(geometry="eq")),), engine="auto")
    answers = world(2).run(by_owners, run, "first axis")
    assert [differences for differences, _, _ in answers] == [[]] * 2
    assert [batch for _, batches, _ in answers for batch in batches] == [("vector",)]
    assert {engine for _, _, engine in answers} == {"foreach + fused"}
    for engine in ("foreach", "reference"):
        assert world(2).run(by_owners, kron("matrix", engine=engine), "first axis") == [([], [], engine)] * 2
    (first, *_), _ = world(2).run(stepped_errors, kron("matrix", options=dict(geometry="eq")), "first axis")
    assert first == (
        "OptionError: engine='fused' cannot run for parameter 'matrix': there is no fused kernel for geometry='eq', "
        "which solves triangular systems; use engine='auto', which takes the fastest engine that can run"
    )
