"""The published implementations, imported so that they run beside one another here.

timm and transformers are installed without what they would drag in; of timm only the optimizers'
own files are loaded, since its package imports torchvision.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import types
import warnings
from typing import Any

import pytest


def peer(module: str) -> Any:
    """A module of a published implementation; the test is skipped where it is not installed."""
    package = module.split(".")[0]
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    if package == "timm":
        _load_only_submodules("timm", "timm.optim", "timm.scheduler")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(module)


def _load_only_submodules(*packages: str) -> None:
    for name in packages:
        if name in sys.modules:
            continue
        parent, _, own = name.rpartition(".")
        if parent:
            folders = [f"{path}/{own}" for path in sys.modules[parent].__path__]
        else:
            spec = importlib.util.find_spec(name)
            assert spec is not None
            folders = list(spec.submodule_search_locations or ())
        package = types.ModuleType(name)
        package.__path__ = folders
        package.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = package
