"""Muon over ranks with products in bfloat16: the numbers of one process, in messages of half the size."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from world import world
from world_layouts import torch
from world_steps import Run, differences
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


def test_blocks_of_unequal_size() -> None:
    sizes = {"even": dict(split=(3, 1)), "cube": dict(split=(1, 2), transposed=True, stacked_axes=1)}
    run = Run("Muon", "float32", OPTIONS, names=MATRICES, rates=(1.0, 0.5), overrides=tuple(sizes.items()))
    assert world(2).run(differences, run, "mixed") == [[]] * 2


def test_messages_are_as_narrow_as_the_products() -> None:
    run = Run("Muon", "float32", OPTIONS, names=MATRICES, rates=(1.0,))
    assert world(2).run(dtypes_sent, run, "first axis") == [["torch.bfloat16"] * 2] * 2


def test_statistics_keep_their_digits() -> None:
    run = Run("Muon", "float32", dict(stacked_axes=1), names=("cube", "kernel"), rates=(1.0,))
    first, second = world(2).run(norms, run, "first axis")
    assert first == second
    params = {name: torch.nn.Parameter(run.numbers(name, 0)) for name in run.names}
    alone = thalweg.torch.Muon(params.items(), stacked_axes=1)
    for name, p in params.items():
        p.grad = run.numbers(name, 1)
    alone.step()
    for name, own in alone.stats().items():
        assert first[name] == pytest.approx(own["norm"].reshape(-1).tolist(), rel=1e-6)
