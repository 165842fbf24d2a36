"""Optimizers that others have published: the packages, where each optimizer is, and how to get it."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

from thalweg.show.modules import import_attribute

#: By the name a package is imported by, then by our rule: the optimizer of that kind.
PUBLISHED: dict[str, dict[str, str]] = {
    "torch": {
        "SGD": "torch.optim.SGD",
        "AdamW": "torch.optim.AdamW",
        "Adafactor": "torch.optim.Adafactor",
    },
    "timm": {
        "LARS": "timm.optim.lars.Lars",
        "LAMB": "timm.optim.lamb.Lamb",
        "Adafactor": "timm.optim.adafactor.Adafactor",
        "Kron": "timm.optim.kron.Kron",
    },
    "pytorch_optimizer": {
        "LARS": "pytorch_optimizer.LARS",
        "LAMB": "pytorch_optimizer.Lamb",
        "Kron": "pytorch_optimizer.Kron",
    },
    "transformers": {"Adafactor": "transformers.optimization.Adafactor"},
    "optax": {
        "SGD": "optax.sgd",
        "AdamW": "optax.adamw",
        "LARS": "optax.lars",
        "LAMB": "optax.lamb",
        "Adafactor": "optax.adafactor",
    },
    "apex": {"LAMB": "apex.optimizers.FusedLAMB"},
    "kron_torch": {"Kron": "kron_torch.Kron"},
}
PACKAGES = tuple(PUBLISHED)

#: How to get those that are not installed by the name they are imported by.
FROM = {
    "kron_torch": "pip install kron-torch",
    "optax": 'pip install "thalweg[jax]"',
    "apex": "it is built from its source, github.com/NVIDIA/apex",
}


def is_installed(package: str) -> bool:
    return package in sys.modules or importlib.util.find_spec(package) is not None


def how_to_install(package: str) -> str:
    return FROM.get(package, f"pip install {package}")


def import_optimizer(reference: str) -> tuple[Any, Any]:
    """An optimizer of another library, ``module:Class`` or ``package.Class``, and its module."""
    module, _, attribute = reference.partition(":") if ":" in reference else reference.rpartition(".")
    if module.partition(".")[0] == "timm" and is_installed("timm"):
        prepare_timm()
    return import_attribute(f"{module}:{attribute}", "optimizer", "torch.optim:Adam", callable)


def prepare_timm() -> None:
    """Where there is no torchvision, which timm as a whole needs, let its optimizers be imported by themselves.

    Its packages then import nothing of their own, but know where their files are.
    """
    if is_installed("torchvision"):
        return
    folders = list(getattr(importlib.util.find_spec("timm"), "submodule_search_locations", None) or ())
    for package, inside in (("timm", ""), ("timm.optim", "optim")):
        if package not in sys.modules:
            sys.modules[package] = module = types.ModuleType(package)
            module.__path__ = [str(Path(folder) / inside) for folder in folders]
            module.__spec__ = importlib.machinery.ModuleSpec(package, None, is_package=True)
