"""What tensors can be stepped, and what is said of those that cannot."""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.errors import ParameterError

SERVED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check_parameter(name: str, p: Tensor) -> None:
    if p.is_complex():
        raise ParameterError(
            f"parameter {name!r} is complex: step torch.view_as_real of it, which shares its memory, instead"
        )
    if p.dtype not in SERVED:
        raise ParameterError(
            f"parameter {name!r} has dtype {p.dtype}: float32, float64, bfloat16 and float16 can be stepped"
        )
    if p.layout is not torch.strided:
        raise ParameterError(f"parameter {name!r} has layout {p.layout}: dense tensors (torch.strided) can be stepped")
    if getattr(p, "_is_flat_param", False) or getattr(p, "_fsdp_flattened", False):
        raise ParameterError(
            f"parameter {name!r} belongs to FullyShardedDataParallel (FSDP1), which flattens parameters, so that their "
            "shapes and norms are lost: use torch.distributed.fsdp.fully_shard (FSDP2) instead"
        )


def check_gradient(name: str, p: Tensor, g: Tensor) -> None:
    if g.layout is not torch.strided:
        raise ParameterError(
            f"the gradient of {name!r} is sparse ({g.layout}): make it dense (for an embedding: sparse=False), "
            "or leave this parameter to torch.optim.SparseAdam"
        )
    if g.dtype not in SERVED:
        raise ParameterError(
            f"the gradient of {name!r} has dtype {g.dtype}: it must be float32, float64, bfloat16 or float16"
        )
    if g.shape != p.shape:
        raise ParameterError(
            f"the gradient of {name!r} has shape {tuple(g.shape)}, and its parameter {tuple(p.shape)}: must be equal"
        )
    if g.device != p.device:
        raise ParameterError(
            f"the gradient of {name!r} is on {g.device}, and its parameter on {p.device}: must be the same"
        )
