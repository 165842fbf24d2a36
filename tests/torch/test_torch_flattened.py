"""Parameters that were exchanged for flattened ones, as DeepSpeed's ZeRO does after an optimizer is constructed.

DeepSpeed is not installed here. What it does to groups is repeated from its version 0.19.8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._utils import _flatten_dense_tensors  # noqa: E402

import thalweg.torch  # noqa: E402
from thalweg.errors import ParameterError  # noqa: E402
from thalweg.rules import LAMB, RULES  # noqa: E402
from thalweg.torch.params import checks  # noqa: E402
from thalweg.torch.params.checks import BY_SHAPES, check_exchanged, reason_against_flat  # noqa: E402

MODEL = [(16, 8), (16,), (4, 16), (4,)]
VECTORS = [(5,), (9,), (1,)]


def made(shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    return [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]


# ---- what DeepSpeed does


def zero_1_and_2(group: dict[str, Any], ranks: int = 1, rank: int = 0, alignment: int = 1) -> None:
    """``deepspeed/runtime/zero/stage_1_and_2.py``, ``__init__``: one partition, with no marks."""
    trainable = [p for p in group["params"] if p.requires_grad]
    padded = []
    for p in trainable:
        padded += [p.detach(), torch.zeros(-p.numel() % alignment)]
    whole = _flatten_dense_tensors(padded)
    multiple = 2 * ranks
    whole = torch.cat([whole, torch.zeros(math.ceil(whole.numel() / multiple) * multiple - whole.numel())])
    partition = whole.chunk(ranks)[rank].detach().clone().float()
    partition.requires_grad = True
    group["params"] = [partition]


def fused(group: dict[str, Any]) -> None:
    """``deepspeed/runtime/fp16/fused_optimizer.py``, ``FP16_Optimizer.__init__``: one vector, with no padding."""
    flat = _flatten_dense_tensors([p.clone().detach() for p in group["params"]]).float().detach()
    flat.requires_grad = True
    group["params"] = [flat]


def zero_3(group: dict[str, Any]) -> None:
    """``deepspeed/runtime/zero/stage3.py``: ``_create_fp32_partitions``, and ``_optimizer_step`` before a step."""
    flat = _flatten_dense_tensors([p.detach() for p in group["params"][:2]]).clone()
    flat.ds_id = "0_1"
    flat.requires_grad = True
    group["params"] = []
    group["params"] = [flat]


def unfused(group: dict[str, Any]) -> None:
    """``deepspeed/runtime/fp16/unfused_optimizer.py``, as stage 0 uses it: masters of the shapes of parameters."""
    masters = [p.clone().float().detach() for p in group["params"] if p.requires_grad]
    for p in masters:
        p.requires_grad = True
    group["params"] = masters


def exchange(shapes: Sequence[tuple[int, ...]], change: Callable[[dict[str, Any]], None], reason: str) -> None:
    """Look at a group before and after it was changed."""
    group = {"params": made(shapes)}
    before = [tuple(p.shape) for p in group["params"]]
    change(group)
    check_exchanged(0, before, group["params"], reason)


FLATTEN = {
    "stage 1 or 2": zero_1_and_2,
    "stage 1 or 2, aligned for float32": lambda group: zero_1_and_2(group, alignment=4),
    "stage 1 or 2, aligned for bfloat16": lambda group: zero_1_and_2(group, alignment=8),
    "stage 0 with a fused optimizer": fused,
    "stage 3": zero_3,
}


@pytest.mark.parametrize("how", FLATTEN)
@pytest.mark.parametrize("shapes", [MODEL, [(3, 5)], VECTORS], ids=str)
def test_parameters_that_became_a_vector_are_refused(how: str, shapes: list[tuple[int, ...]]) -> None:
    if how == "stage 3" and shapes == VECTORS:
        pytest.skip("told by its mark")
    words = (
        r"parameter group 0: parameters of shapes \(.*ZeRO.*flatten parameters and so lose their shapes and norms: "
        r"use ZeRO stage 0, or .*fully_shard \(FSDP2\), or .*trust=False"
    )
    with pytest.raises(ParameterError, match=words):
        exchange(shapes, FLATTEN[how], BY_SHAPES)
    exchange(shapes, FLATTEN[how], "")


@pytest.mark.parametrize("shapes", [MODEL, VECTORS], ids=["matrices", "vectors"])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_every_rank_refuses_its_partition(
    shapes: list[tuple[int, ...]], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks.torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(checks.torch.distributed, "get_world_size", lambda: 8)
    for rank in range(ranks):
        with pytest.raises(ParameterError, match="DeepSpeed"):
            exchange(shapes, lambda group, rank=rank: zero_1_and_2(group, ranks, rank), BY_SHAPES)  # type: ignore[misc]


def test_a_partition_as_long_as_a_bias_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(checks.torch.distributed, "get_world_size", lambda: 5)
    with pytest.raises(ParameterError, match=r"vectors of 4 elements"):
        exchange([(4, 4), (4,)], lambda group: zero_1_and_2(group, 5, 2), BY_SHAPES)


def test_frozen_parameters_are_left_out() -> None:
    def change(group: dict[str, Any]) -> None:
        group["params"][1].requires_grad_(False)
        zero_1_and_2(group)

    with pytest.raises(ParameterError, match="DeepSpeed"):
        exchange(MODEL, change, BY_SHAPES)


def test_masters_with_the_shapes_of_parameters_are_served() -> None:
    exchange(MODEL, unfused, BY_SHAPES)


def test_megatron_slices_each_parameter_and_is_refused() -> None:
    """A 1-D slice of every parameter whose range touches this rank's."""

    def change(group: dict[str, Any]) -> None:
        group["params"] = [p.detach().view(-1)[: max(1, p.numel() // 2)].clone() for p in group["params"]]

    with pytest.raises(ParameterError, match="flatten parameters and so lose their shapes"):
        exchange(MODEL, change, BY_SHAPES)


# ---- what is no flattening


def replaced(*shapes: tuple[int, ...]) -> Callable[[dict[str, Any]], None]:
    return lambda group: group.__setitem__("params", made(shapes))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (MODEL, MODEL),
        (MODEL, [(32, 8), (32,), (4, 32), (4,)]),  # a layer that grows
        ([(100, 3)], [(140, 3)]),  # Gaussians that split: one tensor in a group
        ([(100, 1, 3)], [(80, 1, 3)]),
        ([(100,)], [(140,)]),
        ([(100,), (100,)], [(140,), (140,)]),
        ([(100, 3)], [(0, 3)]),
        (VECTORS, VECTORS),  # a model of vectors alone
        (VECTORS, [(6,), (10,), (2,)]),
        (VECTORS, [(9,)]),  # of which one is kept
        (VECTORS, [(7,)]),
        (MODEL, [(4,)]),
        (MODEL, []),  # between the steps of stage 3
        ([], [(12,)]),
        ([(5,)], [(5,)]),
        ([(5,)], [(12,)]),
    ],
    ids=str,
)
def test_other_exchanges_are_served(before: list[tuple[int, ...]], after: list[tuple[int, ...]]) -> None:
    exchange(before, replaced(*after), BY_SHAPES)


class Distributed:
    """What is asked of a DTensor here: its shape, that it has a mesh, and no elements of its own."""

    def __init__(self, *shape: int) -> None:
        self.shape, self.ndim, self.device_mesh = torch.Size(shape), len(shape), "mesh"


def test_dtensors_are_served() -> None:
    check_exchanged(0, MODEL, [Distributed(*shape) for shape in MODEL], BY_SHAPES)  # type: ignore[misc]
    check_exchanged(0, MODEL, [Distributed(204)], BY_SHAPES)  # type: ignore[list-item]


# ---- who may be flat


@pytest.mark.parametrize(
    ("change", "overrides", "words"),
    [
        ({"max_grad_norm": 1.0}, (), "max_grad_norm would see only this rank's shard; use DeepSpeed's"),
        ({"on_nonfinite": "skip"}, (), "on_nonfinite='skip' would see only this rank's shard; use 'propagate'"),
        ({"on_nonfinite": "raise"}, (), "on_nonfinite='raise' would see"),
        ({}, (("*.bias", {"weight_decay": 0.0}),), "overrides cannot tell them apart"),
    ],
)
def test_what_looks_at_all_parameters_may_not(change: dict[str, Any], overrides: Any, words: str) -> None:
    assert words in reason_against_flat(
        LAMB(trust=False), {"max_grad_norm": None, "on_nonfinite": "propagate", **change}, overrides
    )


# ---- and what an optimizer says at the next step


@pytest.mark.parametrize("named", [False, True], ids=["by position", "by name"])
@pytest.mark.parametrize("stepped_before", [False, True], ids=["at once", "later"])
@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule().looks_at_shapes and name != "Muon"])
def test_an_optimizer_refuses_to_step_a_partition(name: str, stepped_before: bool, named: bool) -> None:
    params = made(MODEL)
    given = [(f"layer.{i}", p) for i, p in enumerate(params)] if named else params
    optimizer = getattr(thalweg.torch, name)(given, lr=0.1)
    for p in params:
        p.grad = torch.ones_like(p)
    if stepped_before:
        optimizer.step()
    (group,) = optimizer.param_groups
    zero_1_and_2(group)
    (flat,) = group["params"]
    flat.grad = torch.ones_like(flat)
    before = flat.detach().clone()
    for _ in range(2):
        with pytest.raises(ParameterError, match=r"parameter group 0: .*ZeRO.*fully_shard"):
            optimizer.step()
    assert torch.equal(flat, before)
    assert flat not in optimizer.state


@pytest.mark.parametrize("how", ["taken away", "empty between steps"])
def test_groups_do_not_hide_it(how: str) -> None:
    optimizer = thalweg.torch.LAMB([{"params": []}, {"params": made(MODEL)}])
    # as deepspeed/runtime/engine.py removes empty groups
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    (group,) = optimizer.param_groups
    if how == "empty between steps":
        params, group["params"] = group["params"], []
        optimizer.step()
        group["params"] = params
    zero_1_and_2(group)
    with pytest.raises(ParameterError, match="parameter group 0: parameters of shapes"):
        optimizer.step()


@pytest.mark.parametrize(
    ("name", "options"), [("LAMB", dict(trust=False)), ("LARS", dict(trust=False)), ("SGD", {}), ("AdamW", {})]
)
def test_an_optimizer_without_ratios_steps_a_partition(name: str, options: dict[str, Any]) -> None:
    params, alone = made(MODEL), made(MODEL)
    optimizer, other = (getattr(thalweg.torch, name)(some, lr=0.1, **options) for some in (params, alone))
    with torch.no_grad():
        for p, q in zip(params, alone, strict=True):
            q.copy_(p)
    zero_1_and_2(optimizer.param_groups[0])
    (flat,) = optimizer.param_groups[0]["params"]
    flat.grad = flat.detach().sin()
    for q in alone:
        q.grad = q.detach().sin()
    optimizer.step()
    other.step()
    whole = _flatten_dense_tensors([q.detach() for q in alone])
    torch.testing.assert_close(flat.detach()[: whole.numel()], whole)


def test_stage_3_is_refused_when_the_optimizer_is_made() -> None:
    p = torch.nn.Parameter(torch.empty(0))  # as deepspeed.zero.Init leaves a parameter
    p.ds_id, p.ds_shape = 0, (4, 4)
    words = (
        r"'weight' belongs to stage 3 of DeepSpeed's ZeRO.*flattens parameters and so loses their shapes and norms: "
        r"use ZeRO stage 0"
    )
    with pytest.raises(ParameterError, match=words):
        thalweg.torch.LAMB([("weight", p)])
    thalweg.torch.LAMB([("weight", p)], trust=False)
