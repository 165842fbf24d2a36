"""Gradients: checked, and placed like their parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.errors import ParameterError
from thalweg.torch.params.checks import NAMES
from thalweg.torch.sharding.shards import is_distributed


def gradient_of(name: str, p: Tensor, g: Tensor) -> Tensor:
    """The gradient of a parameter, or this rank's shard of it; raise if it does not fit."""
    check_gradient(name, p, g)
    return gradient_like(name, p, g)


def check_gradient(name: str, p: Tensor, g: Tensor) -> None:
    if g.layout is not torch.strided:
        raise ParameterError(
            f"the gradient of {name!r} is sparse ({g.layout}): make it dense (for an embedding: sparse=False), "
            "or leave this parameter to torch.optim.SparseAdam"
        )
    if g.dtype not in NAMES:
        raise ParameterError(
            f"the gradient of {name!r} has dtype {g.dtype}: it must be float32, float64, bfloat16 or float16"
        )
    if g.shape != p.shape:
        raise ParameterError(
            f"the gradient of {name!r} has shape {tuple(g.shape)}, and its parameter {tuple(p.shape)}: "
            "they must be equal"
        )
    if g.device != p.device:
        raise ParameterError(
            f"the gradient of {name!r} is on {g.device}, and its parameter on {p.device}: "
            "they must be on the same device"
        )


def gradient_like(name: str, p: Tensor, g: Tensor) -> Tensor:
    """A gradient with the placements of its parameter: partial sums are reduced, and other placements redistributed."""
    if not is_distributed(p):
        if is_distributed(g):
            raise ParameterError(
                f"the gradient of {name!r} is a DTensor and its parameter is not: both must be DTensors, or neither"
            )
        return g
    if not is_distributed(g):
        raise ParameterError(
            f"the parameter {name!r} is a DTensor and its gradient is not: both must be DTensors, or neither"
        )
    if g.device_mesh != p.device_mesh:  # type: ignore[attr-defined]
        raise ParameterError(
            f"the gradient of {name!r} is on another device mesh than its parameter: both must be on the same mesh"
        )
    if g.placements != p.placements:  # type: ignore[attr-defined]
        g = g.redistribute(p.device_mesh, p.placements)  # type: ignore[attr-defined]
    return g.to_local()  # type: ignore[attr-defined, no-any-return]
