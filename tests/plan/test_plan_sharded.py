"""What is planned for ranks against what ranks keep and send, to the byte."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

from lanes import one_in
from measured_peaks import interpreted_measure, interpreted_peak
from sharded_costs import LAYOUTS, Case, Measured, Sent, measure, measure_parallel
from world import world

from thalweg.kernels.cpu.library import reason_missing
from thalweg.plan.items import Cut, Item, Place, shard
from thalweg.plan.models import Tensor
from thalweg.plan.optimizers import setting_of
from thalweg.plan.ranks import find_kernels, messages, ring
from thalweg.plan.shares import Share, share_of, unlike_shares
from thalweg.programs.budget import entry_bytes
from thalweg.show.arguments import Given

pytestmark = pytest.mark.slow

#: The rules that step parts of tensors by sums over them.
BY_SUMS = ("SGD", "AdamW", "LARS", "LAMB", "Adafactor")
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("LARS", {"momentum": 0.0}),
    ("LAMB", {"momentum_dtype": "bfloat16", "max_grad_norm": 1.0}),
    ("LAMB", {"on_nonfinite": "skip"}),
    ("LAMB", {"on_nonfinite": "raise", "state_dtype": "float16"}),
    ("Adafactor", {"min_dim_size_to_factor": 0}),
    ("Adafactor", {"min_dim_size_to_factor": 2, "momentum": 0.9, "factor_dims": "last2"}),
    ("Adafactor", {"factored": False, "on_nonfinite": "skip", "max_grad_norm": 1.0}),
]
#: Kron's factors are refreshed in the second step, and not in the third.
KRON: list[dict[str, Any]] = [
    {},
    {"momentum": 0.0, "max_size_dense": 64, "max_grad_norm": 1.0},
    {"momentum_mode": "ema", "momentum_dtype": "bfloat16", "precond_dtype": "bfloat16"},
    {"momentum_mode": "ema", "whiten": "momentum", "geometry": "quad", "merge": None},
    {"on_nonfinite": "skip", "precond_dtype": "float16"},
    {"normalize_grads": True, "block_size": 50, "max_skew": None},
]
STACKED = ((4, 130, 140), (3, 7, 8), (5, 2, 3))


def cases(world: int) -> list[Case]:
    """Options and dtypes with two ranks; layouts with as many as they need."""
    found = [Case(name) for name in BY_SUMS]
    found += [
        Case("Kron", {**options, "precond_update_probability": 0.5}) for options in (KRON if world == 2 else KRON[:2])
    ]
    owned: list[tuple[str, dict[str, Any]]] = [
        ("Muon", {"vectors": "row"}),
        ("SOAP", {"precondition_frequency": 1}),
        ("Kron", {"precond_update_probability": 0.5}),
    ]
    layouts = ["fsdp2", "copies", *(["hsdp"] if world == 4 else [])]
    found += [Case(name, options, layout) for name, options in owned for layout in layouts]
    found += [Case(name, {"stacked_axes": 1}, shapes=STACKED) for name in ("LARS", "LAMB", "Adafactor", "Muon", "Kron")]
    if world == 2:
        found += [Case(name, options) for name, options in OPTIONS]
        if reason_missing() is None:
            found += [Case(name, engine="fused") for name in BY_SUMS if name != "Adafactor"]
        found += [Case(name, dtypes=("bfloat16",)) for name in ("LAMB", "Adafactor", "Kron")]
        found += [Case(name, dtypes=("float32", "float64")) for name in ("LARS", "Adafactor", "Kron")]
    others = [layout for layout, (sizes, _) in LAYOUTS.items() if layout != "fsdp2" and world in sizes]
    found += [Case("LAMB", {"max_grad_norm": 1.0}, layout) for layout in others]
    found += [Case("Adafactor", {"min_dim_size_to_factor": 2}, layout) for layout in others]
    return found


#: Cases of two ranks by quarters, and all of four.
RUNS = [*((2, slice(first, None, 4)) for first in range(4)), (4, slice(None))]


@pytest.fixture(scope="module", params=one_in(5, map(pytest.param, RUNS)), ids=str)
def runs(request: pytest.FixtureRequest) -> list[tuple[Case, list[Measured]]]:
    """Cases, with what each of so many ranks measured."""
    ranks, which = request.param
    return [(case, world(ranks).run(measure, case)) for case in cases(ranks)[which]]


def tensors_of(case: Case) -> list[Tensor]:
    return [Tensor(f"p{i}", shape, dtype) for i, (shape, dtype) in enumerate(case.tensors())]


def setting(case: Case) -> Any:
    return setting_of(case.optimizer, [Given(case.optimizer, key, value) for key, value in case.options.items()])


def planned_share(case: Case, place: Place, rank: int) -> Share:
    tensors = tensors_of(case)
    return share_of([setting(case)] * len(tensors), tensors, place, rank)


def each(runs: list[tuple[Case, list[Measured]]], check: Callable[..., None], which: Callable[[Case], bool]) -> None:
    """Check all cases of a sort, naming the one that fails."""
    chosen = [(case, ranks) for case, ranks in runs if which(case)]
    assert len(chosen) > len(BY_SUMS)
    for case, ranks in chosen:
        try:
            check(case, ranks)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


def place_of(case: Case, world: int) -> Place:
    layout = "ddp" if case.layout == "copies" else case.layout
    replicas = {"copies": world, "hsdp": 2}.get(case.layout, 1)
    return Place("torch", "cpu", "foreach", world, layout, replicas=replicas)


def test_state_of_every_rank(runs: Any) -> None:
    def check(case: Case, ranks: list[Measured]) -> None:
        place = place_of(case, len(ranks))
        planned = [planned_share(case, place, rank) for rank in range(len(ranks))]
        assert [share.parameter_bytes for share in planned] == [found.parameter_bytes for found in ranks]
        assert [share.state_bytes for share in planned] == [found.state_bytes for found in ranks]
        tensors = tensors_of(case)
        most = max(unlike_shares([setting(case)] * len(tensors), tensors, place), key=lambda own: own.total_bytes)
        assert most == max(planned, key=lambda share: share.total_bytes)

    each(runs, check, is_planned)


def test_bytes_sent_and_collectives(runs: Any) -> None:
    """What goes to others; sums by the formula of a ring. Not all steps of Kron send the same."""

    def check(case: Case, ranks: list[Measured]) -> None:
        place = place_of(case, len(ranks))
        for rank, found in enumerate(ranks):
            planned = planned_share(case, place, rank)
            sent, received = [planned.sent_bytes] * 2, [planned.received_bytes] * 2
            if "precond_update_probability" in case.options:
                sent[1], received[1] = planned.sent_bytes_without_refresh, planned.received_bytes_without_refresh
            assert [sent_bytes(step, len(ranks)) for step in found.sent] == sent
            assert [received_bytes(step, len(ranks)) for step in found.sent] == received
            assert [len(step) for step in found.sent] == [planned.collectives] * 2

    each(runs, check, is_planned)


def sent_bytes(step: tuple[Sent, ...], world: int) -> int:
    summed = sum(sent.payload for sent in step if sent.name == "all_reduce")
    return ring(summed, world) + sum(sent.payload for sent in step if sent.name == "all_to_all")


def received_bytes(step: tuple[Sent, ...], world: int) -> int:
    """In a ring as much comes as goes."""
    came = sum(sent.received - sent.payload for sent in step if sent.name == "all_to_all")
    return sent_bytes(step, world) + came


def is_planned(case: Case) -> bool:
    return case.layout == "fsdp2" or case.optimizer not in BY_SUMS


PARALLEL: list[tuple[str, dict[str, Any]]] = [
    ("Muon", {"vectors": "row"}),
    ("Kron", {"precond_update_probability": 1.0}),
    ("LAMB", {}),
]


@pytest.mark.parametrize(("rule", "options"), one_in(4, PARALLEL), ids=str)
def test_tensor_parallel(rule: str, options: dict[str, Any]) -> None:
    """State and messages of every rank, where torch divides projections and an embedding, and FSDP2 then the rest."""
    options = dict(options)
    ranks = world(4).run(measure_parallel, rule, dict(options))
    place = Place("torch", "cpu", "foreach", 4, "fsdp2 x tp", tp=2)
    shapes = {"embed_tokens.weight": (21, 10), "q_proj.weight": (14, 10), "q_proj.bias": (14,)}
    shapes |= {"o_proj.weight": (10, 14), "o_proj.bias": (10,), "norm.weight": (10,), "norm.bias": (10,)}
    shapes |= {"up_proj.weight": (130, 10), "down_proj.weight": (10, 130)}
    own = setting_of(rule, [Given(rule, key, value) for key, value in options.items()])
    for rank, found in enumerate(ranks):
        planned = share_of([own] * len(shapes), [Tensor(*pair) for pair in shapes.items()], place, rank)
        assert (planned.parameter_bytes, planned.state_bytes) == (found.parameter_bytes, found.state_bytes)
        assert [sent_bytes(step, 2) for step in found.sent] == [planned.sent_bytes] * 2
        assert [received_bytes(step, 2) for step in found.sent] == [planned.received_bytes] * 2
        assert [len(step) for step in found.sent] == [planned.collectives] * 2


def parts_of(case: Case, world: int, rank: int) -> list[Item]:
    """Cut over every dimension of the mesh in turn, as DTensor does it."""
    sizes, axes = LAYOUTS[case.layout][0][world], LAYOUTS[case.layout][1]
    at = [rank // math.prod(sizes[dimension + 1 :]) % size for dimension, size in enumerate(sizes)]
    found = []
    for tensor in tensors_of(case):
        held, cuts = list(tensor.shape), []
        for dimension, axis in enumerate(axes):
            if axis is not None and axis < len(held):
                held[axis] = shard(held[axis], sizes[dimension], at[dimension])
                cuts.append(Cut(str(dimension), axis, sizes[dimension], at[dimension]))
        own = Tensor(tensor.name, tuple(held), tensor.dtype)
        found.append(Item(own, setting(case).for_shape(tensor.shape), tensor.shape, tuple(cuts)))
    return found


def test_every_message_in_every_layout(runs: Any) -> None:
    """By mesh dimension; state too, so that formulas hold beyond the layout that plans know."""

    def check(case: Case, ranks: list[Measured]) -> None:
        for rank, found in enumerate(ranks):
            parts = parts_of(case, len(ranks), rank)
            planned = messages(parts)
            wanted = [(int(dimension), size) for (_, _, dimension), size in planned.items()]
            for step in found.sent:
                assert sorted((sent.dimension, sent.payload) for sent in step) == sorted(wanted)
            kept = sum(entry_bytes(entry) for part in parts for entry in part.entries.values())
            assert kept + 4 * len(parts) == found.state_bytes

    each(runs, check, lambda case: case.optimizer in BY_SUMS)


# ---- kernels for GPUs, interpreted

#: Small, for every program is interpreted: some are factored, some keep all squares, and one is not divided.
FEW = ((7, 5), (9,), (20, 24), (1, 6), (3, 10, 12), ())
LAUNCHED: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in BY_SUMS),
    ("LARS", {"on_nonfinite": "raise"}),
    ("LAMB", {"on_nonfinite": "skip", "max_grad_norm": 1.0}),
    ("Adafactor", {"min_dim_size_to_factor": 5}),
    ("Adafactor", {"min_dim_size_to_factor": 5, "on_nonfinite": "skip"}),
    ("Adafactor", {"factored": False, "clip_threshold": None, "scale_parameter": False, "on_nonfinite": "raise"}),
]


@pytest.fixture(scope="module")
def launched() -> list[tuple[Case, list[Measured]]]:
    """Every case, with what each of two ranks measured."""
    pytest.importorskip("triton")
    found = [Case(name, options, engine="fused", shapes=FEW) for name, options in LAUNCHED]
    # what has no kernels is stepped as lists, which have messages of their own
    found += [Case(name, {"max_grad_norm": 1.0}, dtypes=("float32", "float64"), shapes=FEW) for name in BY_SUMS[2:]]
    found += [Case(name, {"stacked_axes": 1}, shapes=STACKED) for name in ("LAMB", "Adafactor")]
    return [(case, world(2).run(interpreted_measure, case)) for case in found]


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
def test_kernels_keep_and_send_what_is_planned(launched: Any) -> None:
    def check(case: Case, ranks: list[Measured]) -> None:
        place = Place("torch", "cuda", case.engine, 2, "fsdp2")
        for rank, found in enumerate(ranks):
            planned = planned_share(case, place, rank)
            assert (planned.parameter_bytes, planned.state_bytes) == (found.parameter_bytes, found.state_bytes)
            assert [sent_bytes(step, 2) for step in found.sent] == [planned.sent_bytes] * 2
            parts = [find_kernels(part, place) for part in parts_of(case, 2, rank)]
            wanted = sorted(messages(parts).values())
            assert [sorted(sent.payload for sent in step) for step in found.sent] == [wanted] * 2
            assert len(wanted) == planned.collectives

    each(launched, check, is_planned)


#: Factors are refreshed in the second step, and not in the third.
OWNED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({}, ("float32", "float64")),
    ({"precond_dtype": "bfloat16", "max_size_dense": 6}, ("bfloat16",)),
    ({"momentum_mode": "ema", "on_nonfinite": "skip"}, ("float32",)),
]


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@pytest.mark.parametrize(("options", "dtypes"), one_in(3, OWNED))
def test_owners_with_kernels_keep_and_send_what_is_planned(options: dict[str, Any], dtypes: tuple[str, ...]) -> None:
    pytest.importorskip("triton")
    case = Case(
        "Kron", {**options, "precond_update_probability": 0.5}, dtypes=dtypes, shapes=((7, 5), (9,), (4, 8), ())
    )
    place = Place("torch", "cuda", "auto", 2, "fsdp2")
    for rank, found in enumerate(world(2).run(interpreted_measure, case)):
        planned = planned_share(case, place, rank)
        assert (planned.parameter_bytes, planned.state_bytes) == (found.parameter_bytes, found.state_bytes)
        assert [sent_bytes(step, 2) for step in found.sent] == [planned.sent_bytes, planned.sent_bytes_without_refresh]
        assert [len(step) for step in found.sent] == [planned.collectives] * 2
        assert planned.engine == ("foreach + fused" if "float64" in dtypes else "fused")


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@pytest.mark.parametrize("rule", ["Kron", "Muon"])
def test_what_owners_with_kernels_allocate_in_a_step(rule: str) -> None:
    """A recorded step keeps it."""
    pytest.importorskip("triton")
    options = {"precond_update_probability": 1.0} if rule == "Kron" else {}
    case = Case(rule, options, dtypes=("float32",), shapes=((96, 64), (96, 64), (64, 96), (64, 96)))
    for rank, found in enumerate(world(2).run(interpreted_peak, case)):
        planned = planned_share(case, Place("torch", "cuda", "auto", 2, "fsdp2"), rank)
        assert planned.engine == "fused"
        assert planned.peak_bytes is not None
        assert found <= planned.peak_bytes
        if rule == "Kron":  # most while updates and factors are sent back
            assert found <= planned.slot_bytes <= 1.25 * found
