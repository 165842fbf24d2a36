"""Optimizers that train nothing: parameters that are not those of the model, or are none."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from thalweg.errors import IdleWarning

#: Steps without any gradient after which one is missed: loaders of checkpoints take a first step before there is one.
PATIENCE = 2


class Idleness:
    """Counts steps that found no gradient, before the first that did."""

    def __init__(self) -> None:
        self.steps = 0

    def note_step(self, params: Iterable[Tensor]) -> None:
        """Warn, once, if parameters cannot have gradients, or have had none for two steps.

        Ranks of several may have no gradients of their own, and an optimizer may have no parameters for a while.
        """
        params = list(params)
        alone = not torch.distributed.is_available() or not torch.distributed.is_initialized()
        if self.steps == PATIENCE or not params or not (alone or torch.distributed.get_world_size() == 1):
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
            warnings.warn(f"this optimizer trains nothing: {reason}; {advice}", IdleWarning, stacklevel=6)


def warn_if_used_up(given: Any, group: str) -> None:
    """Warn of a generator that had no parameters left for a group."""
    if isinstance(given, Iterator):
        warnings.warn(
            f"{group} has no parameters: its 'params' is an iterator that is used up, or was empty; "
            "pass list(model.parameters()), or leave the group out",
            IdleWarning,
            stacklevel=5,
        )
