"""A small network trained through DeepSpeed: what each stage of ZeRO makes of an optimizer."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from torch import nn

import thalweg.torch


def trained(rule: str, stage: int, **options: Any) -> list[Any] | str:
    """The parameters after two steps, or the words of the error."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", DS_ACCELERATOR="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed

        # nothing is compiled for messages of one rank
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
        optimizer = getattr(thalweg.torch, rule)(model.parameters(), lr=0.01, **options)
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        }
        try:
            engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
            for _ in range(2):
                engine.backward(engine(torch.ones(4, 8)).square().mean())
                engine.step()
        except thalweg.OptimError as error:
            return str(error)
        parameters = list(model.parameters())
        with deepspeed.zero.GatheredParameters(parameters, enabled=stage == 3):
            return [p.detach().clone() for p in parameters]
