"""Who trains: thalweg's optimizers with their settings, and peers.

Each is a function of a model, a rate and the task's decay, which answers a list of optimizers, and the rates that its
search begins from. What is alike: matrices decay, tensors of one axis do not, except under settings named "default",
which are what a user gets who passes a model's parameters, a rate and a decay alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import thalweg.torch as ours
from thalweg.show.published import hollow_timm
from thalweg.torch.recipes import kron_adamw, muon_adamw
from thalweg.torch.routing import HIDDEN, roles_of

Make = Callable[[nn.Module, float, float], list[Optimizer]]


@dataclass(frozen=True)
class Contestant:
    package: str
    make: Make
    #: The middle of the first three rates, on text and on images.
    text: float
    images: float


def is_input(name: str, parameter: Any) -> bool:
    """Whether a parameter is the layer that images come in by, in the models of the tasks."""
    return name.startswith("patches.") or name == "0.weight"


def groups(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Matrices with decay, tensors of one axis without."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    return [
        {"params": matrices, "weight_decay": decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]


def own(kind: str, *, decay: float = 1.0, standard: bool = True, **options: Any) -> Make:
    """An optimizer of ours. decay: times the task's."""

    def make(model: nn.Module, lr: float, task_decay: float) -> list[Optimizer]:
        settings = {
            "lr": lr,
            "weight_decay": decay * task_decay,
            "overrides": "standard" if standard else (),
            **options,
        }
        return [getattr(ours, kind)(model.named_parameters(), **settings)]

    return make


def peer(path: str, *, decay: float = 1.0, **options: Any) -> Make:
    """An optimizer of another package, by its path."""

    def make(model: nn.Module, lr: float, task_decay: float) -> list[Optimizer]:
        if path.startswith("timm."):
            hollow_timm()
        module, _, name = path.rpartition(".")
        return [getattr(importlib.import_module(module), name)(groups(model, decay * task_decay), lr=lr, **options)]

    return make


def torch_muon(model: nn.Module, lr: float, decay: float, *, adamw_lr: float = 2e-3) -> list[Optimizer]:
    """torch's Muon for the hidden matrices that it takes, those of two axes; torch's AdamW for all else."""
    roles = roles_of(model)
    hidden = {name for name, p in model.named_parameters() if roles[name].role == HIDDEN and p.ndim == 2}
    rest = [(name, p) for name, p in model.named_parameters() if name not in hidden]
    return [
        torch.optim.Muon(
            [p for name, p in model.named_parameters() if name in hidden],
            lr=lr,
            weight_decay=decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(
            [
                {"params": [p for _, p in rest if p.ndim >= 2], "weight_decay": decay},
                {"params": [p for _, p in rest if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=adamw_lr,
            betas=(0.9, 0.95),
        ),
    ]


def mixture(recipe: Callable[..., Optimizer], **options: Any) -> Make:
    def make(model: nn.Module, lr: float, decay: float) -> list[Optimizer]:
        return [recipe(model, lr, 2e-3, weight_decay=decay, adamw={"betas": (0.9, 0.95)}, **options)]

    return make


#: Polyak momentum adds up ten steps, so that rates are a tenth, and decay is ten times as much.
POLYAK = {"variant": "polyak", "weight_decay_mode": "decoupled"}
NO_SCALE = {"scale_parameter": False, "relative_step": False, "weight_decay_mode": "lr", "beta2_cap": 0.999}

kron = partial(own, "Kron")
adafactor = partial(own, "Adafactor")
lamb = partial(own, "LAMB")
lars = partial(own, "LARS", decay=0.01)

CONTESTANTS = {
    "torch AdamW": Contestant("torch", peer("torch.optim.AdamW", betas=(0.9, 0.95), fused=True), 2e-3, 2e-3),
    # Kron: the default, the first default, "psgd", and steps from one to the other
    "Kron": Contestant("thalweg", kron(), 1e-3, 1e-3),
    "Kron psgd": Contestant("thalweg", kron(variant="psgd"), 1e-3, 1e-3),
    "Kron polyak": Contestant("thalweg", kron(variant="polyak", standard=False, decay=0.0), 3e-4, 3e-4),
    "Kron polyak, decoupled decay": Contestant("thalweg", kron(**POLYAK, decay=10.0), 3e-4, 3e-4),
    "Kron, precond_lr 0.3": Contestant("thalweg", kron(precond_lr=0.3), 1e-3, 1e-3),
    "Kron, precond_lr 1": Contestant("thalweg", kron(precond_lr=1.0), 1e-3, 1e-3),
    "Kron, init_scale 1": Contestant("thalweg", kron(init_scale=1.0), 1e-3, 1e-3),
    "Kron, whiten gradient": Contestant("thalweg", kron(whiten="gradient"), 2e-3, 2e-3),
    "Kron, max_skew None": Contestant("thalweg", kron(max_skew=None), 1e-3, 1e-3),
    # LAMB and LARS: a trust ratio for tensors of one axis, or none
    "LAMB": Contestant("thalweg", lamb(standard=False), 0.02, 0.02),
    "LAMB paper": Contestant("thalweg", lamb(variant="paper", standard=False), 0.02, 0.02),
    "LAMB, norms kept": Contestant("thalweg", lamb(decay=0.0, keep_norms=True), 0.02, 0.02),
    "timm Lamb": Contestant("timm", peer("timm.optim.lamb.Lamb", max_grad_norm=None), 0.02, 0.02),
    "LARS": Contestant("thalweg", lars(standard=False), 6.0, 6.0),
    "LARS, exempt vectors": Contestant("thalweg", lars(standard=False, exempt="vectors"), 3.0, 3.0),
    "timm Lars": Contestant("timm", peer("timm.optim.lars.Lars", momentum=0.9, decay=0.01), 3.0, 3.0),
    # Adafactor: with a rate of the user's, near zero state first
    "Adafactor": Contestant("thalweg", adafactor(), 0.03, 0.03),
    "Adafactor as_adamw": Contestant("thalweg", adafactor(variant="as_adamw"), 2e-3, 1e-3),
    "Adafactor no scale": Contestant("thalweg", adafactor(**NO_SCALE), 1e-3, 1e-3),
    "Adafactor big_vision": Contestant("thalweg", adafactor(variant="big_vision", weight_decay_mode="lr"), 2e-3, 2e-3),
    "torch Adafactor": Contestant("torch", peer("torch.optim.Adafactor"), 0.03, 0.03),
    # mixtures
    "kron_adamw": Contestant("thalweg", mixture(kron_adamw), 1e-3, 1e-3),
    "muon_adamw": Contestant("thalweg", mixture(muon_adamw, muon={"scaling": "match_rms_adamw"}), 2e-3, 2e-3),
    "muon_adamw, input by AdamW": Contestant(
        "thalweg",
        mixture(muon_adamw, muon={"scaling": "match_rms_adamw"}, other=[is_input]),
        2e-3,
        2e-3,
    ),
    "torch Muon and AdamW": Contestant("torch", torch_muon, 2e-3, 2e-3),
    # baselines and slow peers
    "torch SGD": Contestant("torch", peer("torch.optim.SGD", momentum=0.9, nesterov=True, decay=0.01), 0.1, 0.1),
    "Lion": Contestant("thalweg", own("Lion"), 3e-4, 3e-4),
    "kron-torch": Contestant("kron_torch", peer("kron_torch.Kron"), 1e-3, 1e-3),
}
