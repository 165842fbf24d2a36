"""Tensors that do not lie as fused code needs them: copies to read, and copies to step in their place."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from thalweg.torch.engines.protocol import Bucket


def gradients_like(params: Sequence[Tensor], grads: Sequence[Tensor], contiguous: bool) -> Sequence[Tensor]:
    """Gradients that lie as their parameters do; copies where they differ. contiguous: whether all parameters are."""
    if contiguous and all(map(Tensor.is_contiguous, grads)) and not any(map(Tensor.is_neg, grads)):
        return grads
    return [alike(p, g) for p, g in zip(params, grads, strict=True)]


def are_the_same(objects: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether none of them was replaced."""
    return len(objects) == len(others) and all(map(operator.is_, objects, others))


def alike(p: Tensor, g: Tensor) -> Tensor:
    if g.stride() != p.stride() or g.is_neg():
        return torch.empty_like(p, dtype=g.dtype).copy_(g)
    return g


def stage_shards(bucket: Bucket) -> tuple[Bucket, list[tuple[Tensor, Tensor]]]:
    """A bucket of shards with copies in place of those that are not contiguous, and which those are.

    All ranks must take the same engine, whatever the memory layout of their shards.
    """
    pairs = []

    def contiguous(x: Tensor) -> Tensor:
        if x.is_contiguous():
            return x
        pairs.append((x, x.contiguous()))
        return pairs[-1][1]

    params = [contiguous(p) for p in bucket.params]
    states = [{key: contiguous(entry) for key, entry in state.items()} for state in bucket.states]
    return replace(bucket, params=params, states=states), pairs


def held_in(place: Tensor | None, value: Tensor | None) -> Tensor | None:
    """A value in memory that stays where it is."""
    if value is None:
        return None
    if place is None or place.dtype != value.dtype:
        return value.clone()
    return place.copy_(value)
