"""The published optimizers beside ours. A new one is a row in ``PEERS``.

Settings make the work comparable: arithmetic of the same kind on the same tensors, not each one's defaults.

LAMB        Weight decay within the update and a trust ratio for every tensor. No one clips gradients together, which
            would be one more pass over them (timm's default), but apex, whose kernels compute that norm always.
            pytorch_optimizer has no bias correction: a little less.
LARS        Momentum 0.9, weight decay, a trust ratio for every tensor; pytorch_optimizer leaves vectors out of it.
Adafactor   A given step size, factored squares, no momentum, updates clipped to an RMS of 1; RMS(p) is computed by all,
            and multiplies the step size but in timm, which computes it and leaves it. Matrices are factored alike in
            gpt2 and bert-large. Convolutions are not: ours and optax factor the two largest axes, from 128 on; timm
            the first two, from 17 on; torch and transformers the last two, 3 x 3 windows included: there the work of
            resnet50 differs.
Kron        Factors are refreshed in every step, which is the dearest step there is, and dense up to 8192 rows. Ours
            keeps a diagonal where a dense factor would be larger than the tensor itself; the others do not. timm and
            kron-torch compile themselves, which takes a minute on their first step.
AdamW, SGD  The same arithmetic as torch's. Its fused AdamW is in every comparison: everybody knows it, and it is
            as near to the memory's speed as anyone comes.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from thalweg.bench.contestants import Contestant, Ready, Stepping, ready_optax, ready_torch
from thalweg.bench.ours import SETTINGS
from thalweg.show.published import PUBLISHED, prepare_timm

if TYPE_CHECKING:
    from thalweg.bench.workload import Workload

Build = Callable[[list[Any]], Any]


def build_from(path: str, **options: Any) -> Build:
    """A function that builds an optimizer, and imports its module only then."""
    module, _, name = path.rpartition(".")
    return lambda params: getattr(importlib.import_module(module), name)(params, **options)


def enter_torch(
    rule: str, package: str, name: str, build: Build, copies: int, *, writes_grads: bool = False
) -> Contestant:
    """An optimizer of torch, which ``build`` makes for a list of parameters."""

    def make(workload: Workload, stepping: Stepping) -> Ready:
        if package == "timm":
            prepare_timm()
        return ready_torch(build, workload, stepping, writes_grads=writes_grads)

    return Contestant(name, rule, package, "torch", make, copies + writes_grads, SETTINGS.get(rule, {}))


def enter_published(rule: str, package: str, copies: int, *, writes_grads: bool = False, **options: Any) -> Contestant:
    """A package's optimizer that follows one of our rules."""
    path = PUBLISHED[package][rule]
    shown = [f"{key}={value}" for key, value in options.items() if key in ("foreach", "fused")]
    name = path.rpartition(".")[2] + (f"({', '.join(shown)})" if shown else "")
    title = f"torch.optim.{name}" if package == "torch" else f"{package.replace('kron_torch', 'kron-torch')} {name}"
    return enter_torch(rule, package, title, build_from(path, **options), copies, writes_grads=writes_grads)


def enter_optax(rule: str, copies: int, **options: Any) -> Contestant:
    name = rule.lower()

    def make(workload: Workload, stepping: Stepping) -> Ready:
        import optax

        return ready_optax(getattr(optax, name)(**options), workload, stepping)

    return Contestant(f"optax.{name}, jax.jit", rule, "optax", "optax", make, copies, SETTINGS.get(rule, {}))


LAMB, LARS, ADAFACTOR, ADAMW, SGD = (SETTINGS[rule] for rule in ("LAMB", "LARS", "Adafactor", "AdamW", "SGD"))
enter_kron = functools.partial(enter_published, "Kron", lr=1e-3)

#: In every comparison, and what times are divided by unless another one is asked for.
CONTROL = enter_published("AdamW", "torch", 3, **ADAMW, fused=True)

PEERS = [
    CONTROL,
    enter_published("LAMB", "timm", 3, **LAMB, max_grad_norm=None),
    *(
        enter_published("LAMB", "pytorch_optimizer", 3, **LAMB, weight_decouple=False, foreach=foreach)
        for foreach in (True, False)
    ),
    enter_published("LAMB", "apex", 3, **LAMB, max_grad_norm=float("inf")),
    enter_optax("LAMB", 3, learning_rate=1e-3, weight_decay=0.01),
    enter_published("LARS", "timm", 2, **LARS, momentum=0.9, writes_grads=True),
    *(
        enter_published("LARS", "pytorch_optimizer", 2, **LARS, foreach=foreach, writes_grads=True)
        for foreach in (True, False)
    ),
    enter_optax("LARS", 2, learning_rate=0.1, weight_decay=1e-4),
    *(enter_published("Adafactor", "torch", 1, **ADAFACTOR, foreach=foreach) for foreach in (False, True)),
    enter_published("Adafactor", "timm", 1, **ADAFACTOR),
    enter_published("Adafactor", "transformers", 1, **ADAFACTOR, relative_step=False, scale_parameter=True),
    enter_optax("Adafactor", 1, learning_rate=1e-3),
    enter_kron("timm", 7, preconditioner_update_probability=1.0, max_size_triangular=8192),
    enter_kron("pytorch_optimizer", 7, pre_conditioner_update_probability=1.0),
    enter_kron("kron_torch", 7, preconditioner_update_probability=1.0),
    enter_published("AdamW", "torch", 3, **ADAMW, foreach=True),
    enter_optax("AdamW", 3, learning_rate=1e-3, weight_decay=0.01),
    enter_published("SGD", "torch", 2, **SGD, fused=True),
    enter_published("SGD", "torch", 2, **SGD, foreach=True),
    enter_optax("SGD", 2, learning_rate=1e-3, momentum=0.9),
]
