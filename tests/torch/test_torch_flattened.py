"""Parameters that were exchanged for flattened ones, as DeepSpeed's ZeRO does after an optimizer is constructed.

What it does to groups is repeated from its version 0.19.8; with the package itself: tests/integrations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._utils import _flatten_dense_tensors

import thalweg.torch
from thalweg.check.problem import weights
from thalweg.errors import ParameterError
from thalweg.rules import RULES

MODEL = [(16, 8), (16,), (4, 16), (4,)]
VECTORS = [(5,), (9,), (1,)]
Change = Callable[[dict[str, Any]], None]


def give_gradients(optimizer: Any) -> None:
    for p in optimizer.parameters():
        p.grad = p.detach().sin()


# ---- what DeepSpeed does


def zero_1_and_2(ranks: int = 1, rank: int = 0, alignment: int = 1) -> Change:
    """``deepspeed/runtime/zero/stage_1_and_2.py``, ``__init__``: one partition, with no marks."""

    def change(group: dict[str, Any]) -> None:
        padded = []
        for p in group["params"]:
            if p.requires_grad:
                padded += [p.detach(), torch.zeros(-p.numel() % alignment)]
        whole = _flatten_dense_tensors(padded)
        whole = torch.cat([whole, torch.zeros(-whole.numel() % (2 * ranks))])
        group["params"] = [whole.chunk(ranks)[rank].detach().clone().requires_grad_()]

    return change


def fused(group: dict[str, Any]) -> None:
    """``deepspeed/runtime/fp16/fused_optimizer.py``, ``FP16_Optimizer.__init__``: one vector, with no padding."""
    group["params"] = [_flatten_dense_tensors([p.clone().detach() for p in group["params"]]).requires_grad_()]


def zero_3(group: dict[str, Any]) -> None:
    """``deepspeed/runtime/zero/stage3.py``: ``_create_fp32_partitions``, and ``_optimizer_step`` before a step."""
    flat = _flatten_dense_tensors([p.detach() for p in group["params"][:2]]).clone().requires_grad_()
    flat.ds_id = "0_1"
    group["params"] = [flat]


def megatron(group: dict[str, Any]) -> None:
    """A 1-D slice of every parameter whose range touches this rank's."""
    group["params"] = [p.detach().view(-1)[: max(1, p.numel() // 2)].clone().requires_grad_() for p in group["params"]]


def freeze_one(group: dict[str, Any]) -> None:
    group["params"][1].requires_grad_(False)
    zero_1_and_2()(group)


def step_after(shapes: Any, change: Change, **options: Any) -> None:
    """Construct, change the group, and step."""
    optimizer = thalweg.torch.LAMB(weights(shapes), lr=0.1, **options)
    change(optimizer.param_groups[0])
    give_gradients(optimizer)
    optimizer.step()


#: What is done to a group, and of which models it can be told: not of vectors alone, or in place of a matrix alone.
FLATTEN: dict[str, tuple[Change, list[Any]]] = {
    "stage 1 or 2": (zero_1_and_2(), [MODEL, [(3, 5)], VECTORS]),
    "stage 1 or 2, aligned for float32": (zero_1_and_2(alignment=4), [MODEL, [(3, 5)], VECTORS]),
    "stage 1 or 2, aligned for bfloat16": (zero_1_and_2(alignment=8), [MODEL, [(3, 5)], VECTORS]),
    "stage 0 with a fused optimizer": (fused, [MODEL, [(3, 5)], VECTORS]),
    "stage 3": (zero_3, [MODEL]),  # which marks what it makes
    "one of them frozen": (freeze_one, [MODEL]),
    "slices by Megatron": (megatron, [MODEL]),
}


@pytest.mark.parametrize("how", FLATTEN)
def test_parameters_that_became_a_vector_are_refused(how: str) -> None:
    change, models = FLATTEN[how]
    words = r"parameter group 0: parameters of shapes \(.*ZeRO.*: use ZeRO stage 0, or .*\(FSDP2\), or .*trust=False"
    for shapes in models:
        with pytest.raises(ParameterError, match=words):
            step_after(shapes, change)
        step_after(shapes, change, trust=False)


def test_every_rank_refuses_its_partition() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)  # whose messages go nowhere
    try:
        for shapes in (MODEL, VECTORS):
            for ranks in (2, 5, 8):
                for rank in range(ranks):
                    with pytest.raises(ParameterError, match="DeepSpeed"):
                        step_after(shapes, zero_1_and_2(ranks, rank))
        with pytest.raises(ParameterError, match="vectors of 4 elements"):  # as long as a bias
            step_after([(4, 4), (4,)], zero_1_and_2(5, 2))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (MODEL, [(32, 8), (32,), (4, 32), (4,)]),  # a layer that grows
        ([(100, 3)], [(140, 3)]),  # Gaussians that split: one tensor in a group
        ([(100, 1, 3)], [(80, 1, 3)]),
        ([(100,)], [(140,)]),
        ([(100,), (100,)], [(140,), (140,)]),
        ([(100, 3)], [(0, 3)]),
        (VECTORS, [(6,), (10,), (2,)]),  # a model of vectors alone
        (VECTORS, [(9,)]),  # of which one is kept
        (VECTORS, [(7,)]),
        (MODEL, [(4,)]),
        (MODEL, MODEL),  # masters of the shapes of parameters, as stage 0 has them
        (MODEL, []),  # between the steps of stage 3
        ([(5,)], [(12,)]),
    ],
    ids=str,
)
def test_other_exchanges_are_served(before: Any, after: Any) -> None:
    step_after(before, lambda group: group.update(params=weights(after)))


# ---- who may be flat


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_grad_norm": 1.0}, "max_grad_norm would see only this rank's shard; use DeepSpeed's"),
        ({"on_nonfinite": "skip"}, "on_nonfinite='skip' would see only this rank's shard; use 'propagate'"),
        ({"on_nonfinite": "raise"}, "on_nonfinite='raise' would see"),
        ({"spikes": True}, "spikes would see only the gradient of this rank's shard"),
        ({"overrides": [(lambda name, p: p.ndim < 2, {"weight_decay": 0.0})]}, "overrides cannot tell them apart"),
    ],
    ids=lambda value: "" if isinstance(value, str) else ",".join(value),
)
def test_what_looks_at_all_parameters_may_not(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        step_after(MODEL, zero_1_and_2(), trust=False, **options)


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule().looks_at_shapes and name != "Muon"])
def test_an_optimizer_that_has_stepped_refuses_every_time_and_changes_nothing(name: str) -> None:
    """Nor do groups hide it that were taken away, or are empty between steps."""
    named = [*zip("abcd", weights(MODEL), strict=True)]
    for groups in ([{"params": []}, {"params": weights(MODEL)}], [{"params": named}]):
        optimizer = getattr(thalweg.torch, name)(groups, lr=0.1)
        give_gradients(optimizer)
        optimizer.step()
        del optimizer.param_groups[:-1]  # as deepspeed/runtime/engine.py removes empty groups
        (group,) = optimizer.param_groups
        kept, group["params"] = group["params"], []
        optimizer.step()
        group["params"] = kept
        zero_1_and_2()(group)
        give_gradients(optimizer)
        (flat,) = group["params"]
        before = flat.detach().clone()
        for _ in range(2):
            with pytest.raises(ParameterError, match=r"parameter group 0: .*ZeRO.*fully_shard"):
                optimizer.step()
        assert torch.equal(flat, before)
        assert flat not in optimizer.state


def test_stage_3_is_refused_when_the_optimizer_is_made() -> None:
    p = torch.nn.Parameter(torch.empty(0))  # as deepspeed.zero.Init leaves a parameter
    p.ds_id, p.ds_shape = 0, (4, 4)
    words = r"'weight' belongs to stage 3 of DeepSpeed's ZeRO.*flattens parameters .*: use ZeRO stage 0"
    with pytest.raises(ParameterError, match=words):
        thalweg.torch.LAMB([("weight", p)])
    thalweg.torch.LAMB([("weight", p)], trust=False)
