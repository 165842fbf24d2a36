"""Which tests and pages are left out because they import packages that are not installed."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from pathlib import Path
from typing import Any

#: An import that is not inside a function, in Python or in an example of a page.
IMPORT = re.compile(r"^(?:>>> )?(?:import|from(?= [\w.]+ import )) ([\w.]+)", re.MULTILINE)
#: What a package, or a part of ours, needs to be imported, though it can be installed without.
NEEDED = {"timm": "torchvision", "thalweg.torch": "torch", "thalweg.optax": "optax", "thalweg.cli": "click"}
#: Where packages are imported that the package itself does not need.
FOLDERS = ("src/thalweg/integrations", "tests/integrations", "docs/recipes")
#: What other tests can do without. Another name that is not found is a mistake, and their import tells it.
OPTIONAL = {"torch", "triton", "jax", "optax", "flax", "equinox", "hypothesis", "click"}
#: What tests share.
SUPPORT = Path(__file__).parent

#: Declarations of operators, which end with the object that made them.
KEPT: list[Any] = []


def is_installed(name: str) -> bool:
    """Whether a package is there, and not only a folder of its name."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


@functools.cache
def missing_packages(path: Path) -> frozenset[str]:
    """The packages that a file imports, or what it imports from the tests' support, and that are not installed."""
    found, missing = set(IMPORT.findall(path.read_text(encoding="utf-8"))), set[str]()
    found |= {package for name in found for part, package in NEEDED.items() if f"{name}.".startswith(f"{part}.")}
    for name in {name.partition(".")[0] for name in found}:
        shared = SUPPORT / f"{name}.py"
        if shared.exists():
            missing |= missing_packages(shared)
        elif not is_installed(name):
            missing.add(name)
    return frozenset(missing)


def is_left_out(path: Path, root: Path) -> bool:
    """Whether a file is not collected, for want of a package. Where all are to be there, that is an error."""
    if path.suffix not in (".py", ".md"):
        return False
    if path.is_relative_to(root / "tests") and not path.is_relative_to(root / "tests/integrations"):
        return bool(missing_packages(path)) and missing_packages(path) <= OPTIONAL
    if not any(path.is_relative_to(root / folder) for folder in FOLDERS):
        return False
    missing = sorted(missing_packages(path))
    if missing and os.environ.get("THALWEG_INTEGRATIONS") == "required":
        raise ModuleNotFoundError(f"{path} imports {', '.join(missing)}, which is not installed")
    return bool(missing)


def declare_operators() -> None:
    """Let torchvision be imported beside a torch for CPUs alone.

    On PyPI its compiled operators are for a torch with CUDA. Other packages import it and call none of them.
    """
    try:
        import torchvision  # noqa: F401
    except ImportError:  # those who need it will say so
        pass
    except RuntimeError:
        import torch

        KEPT.append(torch.library.Library("torchvision", "FRAGMENT"))
        for name in ("nms", "qnms"):
            KEPT[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
