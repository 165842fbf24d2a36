"""Few collectives: one for each reduction and each dimension of a mesh that divides something, for the whole model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from world import world
from world_layouts import torch
from world_messages import counts, errors_without_a_gradient, held, messages
from world_steps import EXACT, Run, run_of, told

import thalweg.torch
from thalweg.errors import OptionError
from thalweg.rules import Annealed

pytestmark = pytest.mark.slow

THREE = (1.0,) * 3
#: There and back: to owners of whole tensors.
OWNERS = {"alltoall_base": 2}


def sums(number: int) -> dict[str, int]:
    return {"allreduce": number}


def check(run: Run, layout: str, wanted: dict[str, int], size: int = 2) -> None:
    """What every rank sends after the first step, in which ranks make acquaintance."""
    assert [heard[1:] for heard in world(size).run(counts, run, layout)] == [[wanted] * (len(run.rates) - 1)] * size


def typical(rule: str, options: Mapping[str, Any] | None = None, **how: Any) -> Run:
    return run_of(rule, options=options, **{"rates": THREE, **how})


def divided(rule: str, **how: Any) -> Run:
    """Replicas divide the work."""
    return typical(rule, dict(divide_work=True), replicated=True, **how)


ALONE = dict(divide_work=False)
STACKED = (("kernel", dict(stacked_axes=1)),)
OVERRIDES = (("*e*", dict(lr_scale=0.5)), ("cube", dict(weight_decay=0.3)))
BY_KERNELS: dict[str, Any] = dict(names=("vector", "even"), dtype="float32", interpreted=True, engine="fused")
#: What is stepped, in which layout, and what each rank sends.
SENT: dict[str, tuple[Run, str, dict[str, int]]] = {
    "LARS, copies": (typical("LARS", ALONE), "copies", {}),
    "LAMB": (typical("LAMB", ALONE), "first axis", sums(1)),
    "MARS, mixed": (typical("MARS", ALONE), "mixed", sums(2)),
    # for each dimension of a mesh that divides something
    "Adafactor, strided": (typical("Adafactor", ALONE), "strided", sums(4)),
    # for each team of owners
    "Muon, meshes": (typical("Muon", ALONE), "meshes", {"alltoall_base": 8}),
    "Kron, two axes": (typical("Kron", ALONE), "two axes", OWNERS),
    # to owners within a replica and back, and then to all replicas; whole tensors need not travel to their owners
    "divided over shards": (divided("Muon"), "copies of shards", {"alltoall_base": 3}),
    "divided": (divided("SOAP"), "plain", {"alltoall_base": 1}),
    "nothing to divide": (divided("LAMB"), "plain", {}),
    # what makes no more of them
    "one tensor": (typical("LAMB", names=("matrix",)), "first axis", sums(1)),
    "groups": (typical("SOAP", groups=({}, dict(weight_decay=0.2), dict(lr=0.001))), "first axis", OWNERS),
    "overrides": (typical("Kron", overrides=OVERRIDES), "first axis", OWNERS),
    "missing gradients": (
        *(typical("Adafactor", absent=dict.fromkeys(range(3), ("matrix", "cube"))), "first axis"),
        sums(2),
    ),
    "lists, bfloat16": (typical("MARS", engine="foreach", dtype="bfloat16"), "first axis", sums(2)),
    "kernels: LAMB": (typical("LAMB", **BY_KERNELS), "first axis", sums(1)),
    # rows and columns for some, sums for each slice; a stack has its owners among those who share its slices
    "stacks among others, Muon": (typical("Muon", overrides=STACKED), "two axes", {"alltoall_base": 4}),
    "stacks among others, Adafactor": (
        *(typical("Adafactor", dict(min_dim_size_to_factor=5), overrides=STACKED), "two axes"),
        sums(4),
    ),
    # of each kind a mixture has as many as its rule with most
    "a mixture": (typical("kron_and_others"), "first axis", OWNERS | sums(2)),
    "a mixture, clipped": (typical("kron_and_others", dict(max_grad_norm=1.0)), "first axis", OWNERS | sums(3)),
    "a mixture, raise": (typical("kron_and_others", dict(on_nonfinite="raise")), "first axis", OWNERS | sums(3)),
    "clipped": (typical("LARS", dict(max_grad_norm=1.0)), "first axis", sums(2)),
    "normalized": (typical("Kron", dict(normalize_grads=True)), "first axis", OWNERS | sums(1)),
    # around a rule, an average sends nothing, and a share of elements is one message for the whole model
    "averaged": (typical("LAMB", dict(exempt=None, averaged=0.7), engine="foreach"), "first axis", sums(1)),
    "cautious": (typical("LAMB", dict(exempt=None, cautious=True)), "first axis", sums(1)),
    "cautious, Muon": (typical("Muon", dict(EXACT, cautious=True)), "first axis", OWNERS | sums(1)),
}


@pytest.mark.parametrize("what", SENT)
def test_messages_of_a_step(what: str) -> None:
    run, layout, wanted = SENT[what]
    if run.interpreted:
        pytest.importorskip("triton")
    check(run, layout, wanted, 4 if layout in ("strided", "meshes", "two axes", "copies of shards") else 2)


def test_ranks_tell_their_layouts_once() -> None:
    """Tensors that have gradients by turns stay known."""
    absent: dict[int, tuple[str, ...]] = {0: ("even",), 1: ("matrix",), 2: ("even",), 3: ("matrix",)}
    run = divided("Muon", slot=10**6, names=("matrix", "even"), absent=absent, rates=(1.0,) * 4)
    for first, second, *others in world(2).run(counts, run, "first axis"):
        assert all(set(step) > {"alltoall_base"} for step in (first, second))
        assert others == [{"alltoall_base": 2}] * 2


def test_experts_need_no_owner() -> None:
    run = typical("Muon", dict(stacked_axes=1), names=("cube", "experts"))
    check(run, "first axis", {}, 4)
    # sharded along rows as well, those who share experts have owners
    check(run, "two axes", {"alltoall_base": 2}, 4)


def test_messages_are_as_narrow_as_the_products() -> None:
    """Muon's are in bfloat16: of P elements over w ranks, 4 P / w bytes leave a rank, and few figures."""
    run = Run("Muon", "float32", dict(weight_decay=0.01), names=("even", "large"), rates=(1.0, 1.0))
    elements = 4 * 8 + 130 * 140
    for _, heard in world(2).run(messages, run, "first axis"):
        assert [(kind, dtype) for kind, dtype, _ in heard] == [("alltoall_base", "torch.bfloat16")] * 2
        assert sum(nbytes for *_, nbytes in heard) <= 2 * elements + 2 * elements + 64


# ---- when replicas divide the work


def test_off_where_it_does_not_pay() -> None:
    run = Run("Muon", "float32", dict(weight_decay=0.0), names=("matrix", "large"), replicated=True, rates=(1.0, 1.0))
    divided = "replicas divide the work on 1 parameter; replicas do not divide the work on 1 parameter: messages would"
    forbidden = replace(run, options=dict(divide_work=False))
    for _, note in world(2).run(told, run, "plain"):
        assert all(part in note for part in divided.split("; "))
    assert world(2).run(counts, run, "plain")[0][1:] == [{"alltoall_base": 1}]
    assert world(2).run(counts, forbidden, "plain") == [[{}] * 2] * 2
    assert "divide_work=False" in world(2).run(told, forbidden, "plain")[0][1]


def test_replicas_divide_nothing_that_lists_would_step() -> None:
    """Kernels step whole tensors faster than lists step their share."""
    pytest.importorskip("triton")
    how: dict[str, Any] = dict(names=("large",), rates=(1.0,), replicated=True, interpreted=True)
    apart = "replicas do not divide the work on 1 parameter: fused kernels step it as a whole"
    for options, expected in ((dict(rounding="stochastic"), apart), ({}, "replicas divide the work on 1 parameter")):
        for _, note in world(2).run(told, Run("Muon", "bfloat16", options, **how), "plain"):
            assert expected in note


@pytest.mark.parametrize(
    ("probability", "worth"), [(0.03, True), (1.0, False), (Annealed(low=0.03), True), (Annealed(low=1.0), False)]
)
def test_factors_count_as_often_as_they_are_refreshed(probability: Any, worth: bool) -> None:
    """Replicas divide work by themselves only if the answer arrives before it is computed."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        named = [(f"w{i}", torch.nn.Parameter(torch.ones(64, 64))) for i in range(2)]
        group = torch.distributed.group.WORLD
        optimizer = thalweg.torch.Kron(named, lr=0.1, precond_update_probability=probability, replicas=group)
        told = "replicas divide the work on 2" if worth else "replicas do not divide the work on 2"
        assert told in str(optimizer.explain())
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("rule", "size", "layout"), [("Kron", 2, "plain"), ("Muon", 4, "copies of shards")])
def test_replicas_stay_equal_to_the_bit(rule: str, size: int, layout: str) -> None:
    found = world(size).run(held, divided(rule, dtype="float32"), layout)
    assert found[: size // 2] == found[size // 2 :]


def test_a_gradient_that_is_missing_on_one_rank_is_told() -> None:
    for (error,) in world(2).run(errors_without_a_gradient, divided("Muon", names=("matrix", "large"), rates=(1.0,))):
        assert all(words in error for words in ("ranks differ in what they step", "'large'", "without a gradient"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(replicas="all"), "replicas must be a process group, such as torch.distributed.group.WORLD, got 'all'"),
        (dict(divide_work="yes"), "divide_work must be True, False or None, got 'yes'"),
        (dict(divide_work=True, engine="fused"), "divide_work=True cannot be combined with engine='fused'"),
    ],
    ids=str,
)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        thalweg.torch.Muon([torch.nn.Parameter(torch.ones(3, 3))], lr=0.1, **options)
