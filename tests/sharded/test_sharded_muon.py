"""Muon over ranks with products in bfloat16: the numbers of one process, in messages of half the size."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")

from lanes import one_in
from world import world
from world_layouts import torch
from world_messages import messages
from world_steps import TYPICAL, Run, differences
from world_whole import dtypes_sent, norms

import thalweg.torch

pytestmark = pytest.mark.slow

#: Of the model, those that are matrices.
MATRICES = ("row", "column", "matrix", "even", "cube", "kernel")
OPTIONS: dict[str, Any] = dict(weight_decay=0.01)


@pytest.mark.parametrize(("size", "layout"), [(2, "mixed"), pytest.param(4, "two axes", marks=pytest.mark.slow)])
def test_products_in_bfloat16(size: int, layout: str) -> None:
    run = Run("Muon", "float32", OPTIONS, names=MATRICES, rates=(1.0, 0.5))
    assert world(size).run(differences, run, layout) == [[]] * size


def test_gram_iterations() -> None:
    """Chosen by whole shapes, not by those of shards."""
    run = Run("Muon", "float32", dict(OPTIONS, ns_method="auto"), names=MATRICES, rates=(1.0, 0.5))
    assert world(2).run(differences, run, "mixed") == [[]] * 2


@pytest.mark.parametrize(
    ("size", "layout"), one_in(2, [(2, "mixed"), (2, "last axis"), (4, "two axes"), (4, "strided")])
)
def test_blocks_of_unequal_size(size: int, layout: str) -> None:
    """Shards cut them anywhere."""
    sizes = {"even": dict(split=(3, 1)), "cube": dict(split=(1, 2), transposed=True, stacked_axes=1)}
    run = Run("Muon", "float32", OPTIONS, names=MATRICES, rates=(1.0, 0.5), overrides=tuple(sizes.items()))
    assert world(size).run(differences, run, layout) == [[]] * size


EXPERTS = Run("Muon", options=dict(TYPICAL["Muon"], stacked_axes=1), names=("cube", "experts"))


@pytest.mark.parametrize(
    ("size", "layout"), one_in(2, [(2, "first axis"), (4, "first axis"), (4, "two axes"), (4, "copies of shards")])
)
def test_experts_that_are_sharded_along_the_stack(size: int, layout: str) -> None:
    """Of five experts the last rank of four has none."""
    for options in ({}, dict(on_nonfinite="raise"), dict(max_grad_norm=1.0)):
        run = replace(EXPERTS, options={**EXPERTS.given(), **options})
        assert world(size).run(differences, run, layout) == [[]] * size
    spoilt = replace(EXPERTS, options=dict(EXPERTS.given(), on_nonfinite="skip"), spoilt=((1, "experts", math.nan),))
    assert world(size).run(differences, spoilt, layout) == [[]] * size


def test_experts_need_no_owner() -> None:
    assert world(4).run(messages, EXPERTS, "first axis")[0][1:] == [{}] * 3
    # sharded along rows as well, those who share experts have owners
    assert world(4).run(messages, EXPERTS, "two axes")[0][1:] == [{"alltoall_base": 2}] * 3


def test_messages_are_as_narrow_as_the_products() -> None:
    run = Run("Muon", "float32", OPTIONS, names=MATRICES, rates=(1.0,))
    assert world(2).run(dtypes_sent, run, "first axis") == [["torch.bfloat16"] * 2] * 2


def test_statistics_keep_their_digits() -> None:
    run = Run("Muon", "float32", dict(stacked_axes=1), names=("cube", "kernel"), rates=(1.0,))
    first, second = world(2).run(norms, run, "second axis")
    assert first == second
    params = {name: torch.nn.Parameter(run.numbers(name, 0)) for name in run.names}
    alone = thalweg.torch.Muon(params.items(), stacked_axes=1)
    for name, p in params.items():
        p.grad = run.numbers(name, 1)
    alone.step()
    for name, own in alone.stats().items():
        assert first[name] == pytest.approx(own["norm"].reshape(-1).tolist(), rel=1e-6)
