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
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thalweg.bench.contestants import Contestant, Ready, Stepping, optax_ready, torch_contestant
from thalweg.bench.ours import ADAFACTOR, LAMB, LARS

if TYPE_CHECKING:
    from thalweg.bench.workload import Workload

#: Packages whose optimizers take part, by the name they are imported by.
PACKAGES = ("torch", "timm", "pytorch_optimizer", "transformers", "optax", "apex", "kron_torch")

#: How to get those that are not installed by the name they are imported by.
FROM = {
    "kron_torch": "pip install kron-torch",
    "optax": 'pip install "thalweg[jax]"',
    "apex": "it is built from its source, github.com/NVIDIA/apex",
}

#: What each of them calls a Kron that refreshes its factors in every step.
KRON: dict[str, dict[str, Any]] = {
    "timm": dict(lr=1e-3, preconditioner_update_probability=1.0, max_size_triangular=8192),
    "pytorch_optimizer": dict(lr=1e-3, pre_conditioner_update_probability=1.0),
    "kron_torch": dict(lr=1e-3, preconditioner_update_probability=1.0),
}

Build = Callable[[list[Any]], Any]


def installed(package: str) -> bool:
    return package in sys.modules or importlib.util.find_spec(package) is not None


def how_to_install(package: str) -> str:
    return FROM.get(package, f"pip install {package}")


def built(module: str, name: str, **options: Any) -> Build:
    """What makes an optimizer of a module that is imported only then."""
    return lambda params: getattr(importlib.import_module(module), name)(params, **options)


def built_by_timm(name: str, **options: Any) -> Build:
    """From its own file where there is no torchvision, which timm as a whole needs."""

    def build(params: list[Any]) -> Any:
        if not installed("torchvision"):
            hollow_timm()
        return getattr(importlib.import_module(f"timm.optim.{name.lower()}"), name)(params, **options)

    return build


def hollow_timm() -> None:
    """Packages that import nothing of their own, but know where their files are."""
    folders = list(getattr(importlib.util.find_spec("timm"), "submodule_search_locations", None) or ())
    for package, inside in (("timm", ""), ("timm.optim", "optim")):
        if package not in sys.modules:
            sys.modules[package] = module = types.ModuleType(package)
            module.__path__ = [str(Path(folder) / inside) for folder in folders]
            module.__spec__ = importlib.machinery.ModuleSpec(package, None, is_package=True)


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
    torch_contestant("lamb", "timm", "timm Lamb", built_by_timm("Lamb", **LAMB, max_grad_norm=None), 3),
    *(collected("lamb", "Lamb", 3, foreach=foreach, weight_decouple=False, **LAMB) for foreach in (True, False)),
    torch_contestant(
        "lamb", "apex", "apex FusedLAMB", built("apex.optimizers", "FusedLAMB", **LAMB, max_grad_norm=float("inf")), 3
    ),
    of_optax("lamb", 3, learning_rate=1e-3, weight_decay=0.01),
    control("lamb"),
    torch_contestant("lars", "timm", "timm Lars", built_by_timm("Lars", **LARS, momentum=0.9), 2, writes_grads=True),
    *(collected("lars", "LARS", 2, foreach=foreach, **LARS) for foreach in (True, False)),
    of_optax("lars", 2, learning_rate=0.1, weight_decay=1e-4),
    control("lars"),
    *(of_torch("adafactor", "Adafactor", 1, **ADAFACTOR, foreach=foreach) for foreach in (False, True)),
    torch_contestant("adafactor", "timm", "timm Adafactor", built_by_timm("Adafactor", **ADAFACTOR), 1),
    torch_contestant(
        "adafactor",
        "transformers",
        "transformers Adafactor",
        built("transformers.optimization", "Adafactor", **ADAFACTOR, relative_step=False, scale_parameter=True),
        1,
    ),
    of_optax("adafactor", 1, learning_rate=1e-3),
    control("adafactor"),
    torch_contestant("kron", "timm", "timm Kron", built_by_timm("Kron", **KRON["timm"]), 7),
    torch_contestant(
        "kron",
        "pytorch_optimizer",
        "pytorch_optimizer Kron",
        built("pytorch_optimizer", "Kron", **KRON["pytorch_optimizer"]),
        7,
    ),
    torch_contestant("kron", "kron_torch", "kron-torch Kron", built("kron_torch", "Kron", **KRON["kron_torch"]), 7),
    control("kron"),
    of_optax("adamw", 3, learning_rate=1e-3, weight_decay=0.01),
    control("adamw"),
    of_torch("sgd", "SGD", 2, lr=1e-3, momentum=0.9, fused=True),
    of_optax("sgd", 2, learning_rate=1e-3, momentum=0.9),
    control("sgd"),
    control("muon"),
]
