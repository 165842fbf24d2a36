"""Which tensors can be stepped, the errors for those that cannot, and warnings of optimizers that train nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.arrays import Shape
from thalweg.dtypes import DTYPES
from thalweg.errors import IdleWarning, ParameterError, warn
from thalweg.settings import RuleOptions
from thalweg.torch.sharding.shards import count_ranks, is_distributed

#: The names of the dtypes that parameters and gradients may have.
NAMES = {getattr(torch, name): name for name in DTYPES}
#: What to use where parameters have to keep their shapes.
WHOLE = "ZeRO stage 0, or torch.distributed.fsdp.fully_shard (FSDP2)"
#: The reason against flat parameters that holds unless a rule and its options are known to look at no shapes.
BY_SHAPES = f"use {WHOLE}, or a rule that needs neither, such as AdamW, SGD, or LAMB and LARS with trust=False"
#: Steps without any gradient after which one is missed: loaders of checkpoints take a first step before there is one.
PATIENCE = 2


def reason_against_flat(options: RuleOptions) -> str:
    """Why parameters with these options cannot be stepped as one vector, or as a shard of one; "" if they can."""
    numerics = options.base.numerics
    if options.base.rule.looks_at_shapes:
        return BY_SHAPES
    if options.overrides:
        return f"overrides cannot tell them apart any more; use {WHOLE}"
    if numerics.max_grad_norm is not None:
        return f"max_grad_norm would see only this rank's shard; use DeepSpeed's gradient_clipping, {WHOLE}"
    if numerics.guard is not None:
        return f"spikes would see only the gradient of this rank's shard; leave it out, or use {WHOLE}"
    if numerics.on_nonfinite != "propagate":
        return f"on_nonfinite={numerics.on_nonfinite!r} would see only this rank's shard; use 'propagate', {WHOLE}"
    return ""


def check_parameter(name: str, p: Tensor, against_flat: str = BY_SHAPES) -> None:
    """Refuse a tensor that cannot be stepped. against_flat: what :func:`reason_against_flat` says of its group.

    Weights that are quantized and frozen, as beneath adapters of low rank, may be there: no step looks at them.
    """
    if isinstance(p, nn.Parameter) and p.dtype not in NAMES and not p.requires_grad:
        return
    if p.is_complex():
        raise ParameterError(
            f"parameter {name!r} is complex: pass torch.view_as_real of it instead, which shares its memory"
        )
    if p.dtype not in NAMES:
        raise ParameterError(
            f"parameter {name!r} has dtype {p.dtype}: it must be float32, float64, bfloat16 or float16"
        )
    if p.layout is not torch.strided:
        raise ParameterError(f"parameter {name!r} has layout {p.layout}: it must be dense (torch.strided)")
    if getattr(p, "_is_flat_param", False) or getattr(p, "_fsdp_flattened", False):
        raise ParameterError(
            f"parameter {name!r} belongs to FullyShardedDataParallel (FSDP1), which flattens parameters and so loses "
            "their shapes and norms: use torch.distributed.fsdp.fully_shard (FSDP2) instead"
        )
    # DeepSpeed's ZeRO stage 3 marks the model's own parameters and the flat ones that it makes of them
    if hasattr(p, "ds_id") and against_flat:
        raise ParameterError(
            f"parameter {name!r} belongs to stage 3 of DeepSpeed's ZeRO, which flattens parameters and so loses their "
            f"shapes and norms: {against_flat}"
        )


def check_exchanged(group: int, before: Sequence[Shape], after: Sequence[Tensor], against_flat: str) -> None:
    """Refuse parameters of a group that were exchanged for flattened ones.

    before: the shapes of the group's parameters when it was last looked at, at its construction or a step.
    after: its parameters now; equal shapes are no news, whichever tensors have them.
    against_flat: what :func:`reason_against_flat` says of the group.

    DeepSpeed does it after the optimizer is constructed, with tensors that carry no mark in stages 1 and 2, and without
    mending ``param_names``: so this has to be asked before names are.
    """
    if against_flat and are_flattened(before, after):
        shapes = ", ".join(map(str, before[:4])) + (", ..." if len(before) > 4 else "")
        sizes = ", ".join(str(p.numel()) for p in after[:4]) + (", ..." if len(after) > 4 else "")
        raise ParameterError(
            f"parameter group {group}: parameters of shapes {shapes} were replaced by vectors of {sizes} elements. "
            "Stages 1 to 3 of DeepSpeed's ZeRO do this: they flatten parameters and so lose their shapes and norms: "
            f"{against_flat}"
        )


def are_flattened(before: Sequence[Shape], after: Sequence[Tensor]) -> bool:
    """Whether a group now has vectors in place of matrices, or one vector in place of several.

    Parameters that grow or shrink keep their number of axes, and those that are sharded as DTensors keep their shapes.
    """
    if not after or any(p.ndim != 1 or is_distributed(p) for p in after):
        return False
    had, has = Counter(map(tuple, before)), Counter(tuple(p.shape) for p in after)
    if has - had and any(len(shape) > 1 for shape in had - has):
        return True
    several = len(before) > 1 or any(len(shape) > 1 for shape in before)
    return several and len(after) == 1 and is_partition(after[0].numel(), before)


def is_partition(size: int, shapes: Sequence[Shape]) -> bool:
    """Whether a vector is as long as a rank's part of these tensors laid end to end, with DeepSpeed's padding."""
    total = sum(torch.Size(shape).numel() for shape in shapes)
    # each tensor begins at a multiple of 16 bytes, and each rank's part is a multiple of 2 elements
    return any(0 <= size * parts - total < 8 * len(shapes) + 2 * parts for parts in range(1, count_ranks() + 1))


# ---- optimizers that train nothing


class IdleWatch:
    """Counts steps that found no gradient, before the first that did."""

    def __init__(self) -> None:
        self.steps = 0

    def stop(self) -> None:
        """A parameter has had a gradient."""
        self.steps = PATIENCE

    def note_step(self, params: Iterable[Tensor]) -> None:
        """Warn, once, if parameters cannot have gradients, or have had none for two steps.

        Ranks of several may have no gradients of their own, and an optimizer may have no parameters for a while.
        """
        params = list(params)
        if self.steps == PATIENCE or not params or count_ranks() > 1:
            return
        self.steps += 1
        if not any(p.requires_grad for p in params):
            self.steps = PATIENCE
            reason = f"none of its {len(params)} parameters requires gradients"
            advice = "pass model.parameters() (the tensors of state_dict() require none), or set requires_grad"
        elif all(p.device.type == "meta" for p in params):
            self.steps = PATIENCE
            reason = f"its {len(params)} parameters are on the meta device, which has no numbers"
            advice = "construct it after the model is materialized, with the parameters that the model has then"
        else:
            reason = f"none of its {len(params)} parameters has had a gradient in {PATIENCE} steps"
            advice = "call backward() before step(), and pass the parameters that the model has now"
        if self.steps == PATIENCE:
            warn(f"this optimizer trains nothing: {reason}; {advice}", IdleWarning)


def warn_if_used_up(given: Any, group: str) -> None:
    """Warn of a generator that had no parameters left for a group."""
    if isinstance(given, Iterator):
        warn(
            f"{group} has no parameters: its 'params' is an iterator that is used up, or was empty; "
            "pass list(model.parameters()), or leave the group out",
            IdleWarning,
        )
