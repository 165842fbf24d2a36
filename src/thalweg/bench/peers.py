"""The published optimizers beside ours. A new one is a row in ``PEERS``.

Settings make the work comparable: what is measured is arithmetic of the same kind on the same tensors, not defaults.

LAMB        Weight decay within the update and a trust ratio for every tensor. Nobody clips gradients together, which
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
AdamW, SGD  The same arithmetic as torch's.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from thalweg.bench.contestants import Contestant, Ready, Stepping, optax_ready, torch_contestant
from thalweg.bench.ours import ADAFACTOR, LAMB, LARS
from thalweg.show.published import PUBLISHED, ready_timm

if TYPE_CHECKING:
    from thalweg.bench.workload import Workload

#: What each of them calls a Kron that refreshes its factors in every step.
KRON: dict[str, dict[str, Any]] = {
    "timm": dict(lr=1e-3, preconditioner_update_probability=1.0, max_size_triangular=8192),
    "pytorch_optimizer": dict(lr=1e-3, pre_conditioner_update_probability=1.0),
    "kron_torch": dict(lr=1e-3, preconditioner_update_probability=1.0),
}

Build = Callable[[list[Any]], Any]


def built(module: str, name: str, **options: Any) -> Build:
    """What makes an optimizer of a module that is imported only then."""
    return lambda params: getattr(importlib.import_module(module), name)(params, **options)


def published(package: str, rule: str, **options: Any) -> Build:
    """What makes a package's optimizer of a kind."""

    def build(params: list[Any]) -> Any:
        if package == "timm":
            ready_timm()
        module, _, name = PUBLISHED[package][rule].rpartition(".")
        return built(module, name, **options)(params)

    return build


def of_optax(rule: str, copies: int, **options: Any) -> Contestant:
    def make(workload: Workload, stepping: Stepping) -> Ready:
        import optax

        return optax_ready(getattr(optax, rule)(**options), workload, stepping)

    return Contestant(f"optax.{rule}, jax.jit", rule, "optax", "optax", make, copies)


def of_torch(rule: str, name: str, copies: int, follows: str = "", **options: Any) -> Contestant:
    given = [f"{key}={value}" for key, value in options.items() if key in ("fused", "foreach", "momentum")]
    shown = f"torch.optim.{name}({', '.join(given)})"
    return torch_contestant(rule, "torch", shown, built("torch.optim", name, **options), copies, follows=follows)


def collected(rule: str, name: str, copies: int, *, foreach: bool, **options: Any) -> Contestant:
    build = built("pytorch_optimizer", name, foreach=foreach, **options)
    shown = f"pytorch_optimizer {name}(foreach={foreach})"
    return torch_contestant(rule, "pytorch_optimizer", shown, build, copies, writes_grads=rule == "lars")


def control(rule: str) -> Contestant:
    """torch's fused AdamW, in every comparison: known to all, and as near to the memory's speed as anyone comes."""
    return of_torch(rule, "AdamW", 3, "adamw", lr=1e-3, fused=True)


PEERS = [
    torch_contestant("lamb", "timm", "timm Lamb", published("timm", "LAMB", **LAMB, max_grad_norm=None), 3),
    *(collected("lamb", "Lamb", 3, foreach=foreach, weight_decouple=False, **LAMB) for foreach in (True, False)),
    torch_contestant(
        "lamb", "apex", "apex FusedLAMB", published("apex", "LAMB", **LAMB, max_grad_norm=float("inf")), 3
    ),
    of_optax("lamb", 3, learning_rate=1e-3, weight_decay=0.01),
    control("lamb"),
    torch_contestant(
        "lars", "timm", "timm Lars", published("timm", "LARS", **LARS, momentum=0.9), 2, writes_grads=True
    ),
    *(collected("lars", "LARS", 2, foreach=foreach, **LARS) for foreach in (True, False)),
    of_optax("lars", 2, learning_rate=0.1, weight_decay=1e-4),
    control("lars"),
    *(of_torch("adafactor", "Adafactor", 1, **ADAFACTOR, foreach=foreach) for foreach in (False, True)),
    torch_contestant("adafactor", "timm", "timm Adafactor", published("timm", "Adafactor", **ADAFACTOR), 1),
    torch_contestant(
        "adafactor",
        "transformers",
        "transformers Adafactor",
        published("transformers", "Adafactor", **ADAFACTOR, relative_step=False, scale_parameter=True),
        1,
    ),
    of_optax("adafactor", 1, learning_rate=1e-3),
    control("adafactor"),
    torch_contestant("kron", "timm", "timm Kron", published("timm", "Kron", **KRON["timm"]), 7),
    torch_contestant(
        "kron",
        "pytorch_optimizer",
        "pytorch_optimizer Kron",
        published("pytorch_optimizer", "Kron", **KRON["pytorch_optimizer"]),
        7,
    ),
    torch_contestant("kron", "kron_torch", "kron-torch Kron", published("kron_torch", "Kron", **KRON["kron_torch"]), 7),
    control("kron"),
    of_optax("adamw", 3, learning_rate=1e-3, weight_decay=0.01),
    control("adamw"),
    of_torch("sgd", "SGD", 2, lr=1e-3, momentum=0.9, fused=True),
    of_optax("sgd", 2, learning_rate=1e-3, momentum=0.9),
    control("sgd"),
    control("muon"),
]
