"""Who trains: thalweg's optimizers with their settings, and peers, each as a function of a model and a rate.

What is alike: matrices decay, tensors of one axis do not, except under settings named "default", which are what a user
gets who passes a model's parameters, a rate and a decay alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import thalweg.torch as ours
from benchmarks.training.tasks import SuiteTask
from thalweg.race.contestants import Contestant
from thalweg.rules import AdamW
from thalweg.torch.routing import HIDDEN, roles_of

Make = Callable[..., Optimizer]


@dataclass(frozen=True)
class Entry:
    package: str
    make: Make
    #: The middle of the first three rates, on text and on images.
    text: float
    images: float
    #: Its decay, divided by the task's.
    decay: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)


def enter(name: str, task: SuiteTask) -> Contestant:
    """A contestant of the race on a task."""
    entry = CONTESTANTS[name]
    middle = entry.text if task.name.startswith("text") else entry.images
    return Contestant(
        name=name,
        make=entry.make,
        options={**entry.options, "weight_decay": entry.decay * task.decay},
        rates=[float(f"{middle * factor:.2g}") for factor in (1 / 3, 1, 3)],
    )


def is_input(name: str, parameter: Any) -> bool:
    """Whether a parameter is the layer that images come in by, in the models of the tasks."""
    return name.startswith("patches.") or name == "0.weight"


def make_own(kind: str, model: nn.Module, *, lr: float, standard: bool = True, **options: Any) -> Optimizer:
    overrides = "standard" if standard else ()
    made: Optimizer = getattr(ours, kind)(model.named_parameters(), lr=lr, overrides=overrides, **options)
    return made


def make_peer(path: str, model: nn.Module, *, lr: float, weight_decay: float, **options: Any) -> Optimizer:
    """An optimizer of another package, by its path: matrices with decay, tensors of one axis without."""
    module, _, name = path.rpartition(".")
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    made: Optimizer = getattr(importlib.import_module(module), name)(groups, lr=lr, **options)
    return made


class Together(Optimizer):
    """Two optimizers of parts of a model as one."""

    def __init__(self, *parts: Optimizer) -> None:
        self.parts = parts
        self.param_groups = [group for part in parts for group in part.param_groups]
        self.defaults: dict[str, Any] = {}

    @property
    def state(self) -> Any:
        return {key: value for part in self.parts for key, value in part.state.items()}

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


def make_torch_muon(model: nn.Module, *, lr: float, weight_decay: float, adamw_lr: float) -> Optimizer:
    """torch's Muon for the hidden matrices that it takes, those of two axes; torch's AdamW for all else."""
    roles = roles_of(model)
    hidden = {name for name, p in model.named_parameters() if roles[name].role == HIDDEN and p.ndim == 2}

    def choose(is_hidden: bool, is_matrix: bool = True) -> Iterator[nn.Parameter]:
        named = model.named_parameters()
        return (p for name, p in named if (name in hidden) == is_hidden and (p.ndim >= 2) == is_matrix)

    muon = torch.optim.Muon(choose(True), lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
    rest = [
        {"params": list(choose(False)), "weight_decay": weight_decay},
        {"params": list(choose(False, False)), "weight_decay": 0.0},
    ]
    return Together(muon, torch.optim.AdamW(rest, lr=adamw_lr, betas=(0.9, 0.95)))


def own(kind: str, text: float, images: float | None = None, *, decay: float = 1.0, **options: Any) -> Entry:
    return Entry("thalweg", partial(make_own, kind), text, text if images is None else images, decay, options)


def peer(path: str, rate: float, *, decay: float = 1.0, **options: Any) -> Entry:
    return Entry(path.partition(".")[0], partial(make_peer, path), rate, rate, decay, options)


def mixture(make: Make, rate: float, package: str = "thalweg", **options: Any) -> Entry:
    return Entry(package, make, rate, rate, options={"adamw_lr": 2e-3, **options})


ADAMW = {"betas": (0.9, 0.95)}
AVERAGED: dict[str, Any] = {"averaged": 0.99, "averaged_warmup": True}
MUON: dict[str, Any] = {"muon": {"scaling": "match_rms_adamw"}, "adamw": ADAMW}
#: Polyak momentum adds up ten steps, so that rates are a tenth, and decay is ten times as much.
POLYAK = {"variant": "polyak", "weight_decay_mode": "decoupled"}
NO_SCALE = {"scale_parameter": False, "relative_step": False, "weight_decay_mode": "lr", "beta2_cap": 0.999}


def with_muon(**options: Any) -> dict[str, Any]:
    return {**MUON, "muon": {**MUON["muon"], **options}}


def with_both(**options: Any) -> dict[str, Any]:
    return {**with_muon(**options), "adamw": {**ADAMW, **options}}


kron = partial(own, "Kron")
adafactor = partial(own, "Adafactor")
lamb = partial(own, "LAMB")
lars = partial(own, "LARS", decay=0.01)

CONTESTANTS = {
    "torch AdamW": peer("torch.optim.AdamW", 2e-3, fused=True, **ADAMW),
    # Kron: the default, the first default, "psgd", and steps from one to the other
    "Kron": kron(1e-3),
    "Kron psgd": kron(1e-3, variant="psgd"),
    "Kron polyak": kron(3e-4, variant="polyak", standard=False, decay=0.0),
    "Kron polyak, decoupled decay": kron(3e-4, **POLYAK, decay=10.0),
    "Kron, precond_lr 0.3": kron(1e-3, precond_lr=0.3),
    "Kron, precond_lr 1": kron(1e-3, precond_lr=1.0),
    "Kron, init_scale 1": kron(1e-3, init_scale=1.0),
    "Kron, whiten gradient": kron(2e-3, whiten="gradient"),
    "Kron, max_skew None": kron(1e-3, max_skew=None),
    "Kron, blocks of 256": kron(1e-3, block_size=256),
    "Kron, normalized gradients": kron(1e-3, normalize_grads=True),
    "SOAP": own("SOAP", 2e-3, betas=(0.95, 0.95), max_precond_dim=2048),
    # LAMB and LARS: a trust ratio for tensors of one axis, or none
    "LAMB": lamb(0.02, standard=False),
    "LAMB paper": lamb(0.02, variant="paper", standard=False),
    "LAMB, norms kept": lamb(0.02, decay=0.0, keep_norms=True),
    "timm Lamb": peer("timm.optim.lamb.Lamb", 0.02, max_grad_norm=None),
    "LARS": lars(6.0, standard=False),
    "LARS, exempt vectors": lars(3.0, standard=False, exempt="vectors"),
    "timm Lars": peer("timm.optim.lars.Lars", 3.0, momentum=0.9, decay=0.01),
    # Adafactor: with a rate of the user's, near zero state first
    "Adafactor": adafactor(0.03),
    "Adafactor as_adamw": adafactor(2e-3, 1e-3, variant="as_adamw"),
    "Adafactor no scale": adafactor(1e-3, **NO_SCALE),
    "Adafactor big_vision": adafactor(2e-3, variant="big_vision", weight_decay_mode="lr"),
    "torch Adafactor": peer("torch.optim.Adafactor", 0.03),
    # mixtures
    "kron_adamw": mixture(ours.kron_adamw, 1e-3, adamw=ADAMW),
    "muon_adamw": mixture(ours.muon_adamw, 2e-3, **MUON),
    "muon_adamw, input by AdamW": mixture(partial(ours.muon_adamw, other=[is_input]), 2e-3, **MUON),
    "muon_adamw, Gram": mixture(ours.muon_adamw, 2e-3, **with_muon(ns_method="gram")),
    "muon_adamw, rows normalized": mixture(ours.muon_adamw, 2e-3, **with_muon(normalize="rows")),
    "torch Muon and AdamW": mixture(make_torch_muon, 2e-3, package="torch"),
    # something around a rule
    "AdamW, cautious": own("AdamW", 2e-3, **ADAMW, cautious=True),
    "AdamW, cautious decay": own("AdamW", 2e-3, **ADAMW, cautious="decay"),
    "AdamW, averaged": own("AdamW", 2e-3, **ADAMW, **AVERAGED),
    "AdamW, schedule-free": own("AdamW", 2e-3, betas=(0.0, 0.95), schedule_free=True),
    "AdamW, spikes": own("AdamW", 2e-3, **ADAMW, spikes=True),
    "Lion, size of AdamW": Entry("thalweg", partial(make_own, "Lion", graft=AdamW(**ADAMW)), 2e-3, 2e-3),
    "Kron, cautious": kron(1e-3, cautious=True),
    "Kron, averaged": kron(1e-3, **AVERAGED),
    "muon_adamw, cautious": mixture(ours.muon_adamw, 2e-3, **with_both(cautious=True)),
    "muon_adamw, averaged": mixture(ours.muon_adamw, 2e-3, **with_both(**AVERAGED)),
    # more than one average, or a corrected gradient
    "AdEMAMix": own("AdEMAMix", 1e-3, betas=(0.9, 0.95, 0.999), alpha_warmup=800, beta3_warmup=800),
    "MARS": own("MARS", 3e-3),
    # baselines and slow peers
    "torch SGD": peer("torch.optim.SGD", 0.1, momentum=0.9, nesterov=True, decay=0.01),
    "Lion": own("Lion", 3e-4),
    "kron-torch": peer("kron_torch.Kron", 1e-3),
}
