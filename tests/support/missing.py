"""Which tests and pages are left out because they import packages that are not installed."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

#: An import that is not inside a function, in Python or in an example of a page.
IMPORT = re.compile(r"^(?:>>> )?(?:import (\w+)|from (\w+)[\w.]* import )", re.MULTILINE)
#: What a package needs to be imported, though it can be installed without.
NEEDED = {"timm": "torchvision"}
#: Where packages are imported that the package itself does not need.
FOLDERS = ("src/thalweg/integrations", "tests/integrations", "docs/recipes")

#: Declarations of operators, which end with the object that made them.
KEPT: list[Any] = []


def missing_packages(source: str) -> list[str]:
    """The packages that a source imports and that are not installed."""
    found = {name for pair in IMPORT.findall(source) for name in pair if name}
    found |= {NEEDED[name] for name in found & NEEDED.keys()}
    return sorted(name for name in found - {"__future__"} if importlib.util.find_spec(name) is None)


def is_left_out(path: Path, root: Path) -> bool:
    """Whether a file is not collected, for want of a package. Where all are to be there, that is an error."""
    if path.suffix not in (".py", ".md") or not any(path.is_relative_to(root / folder) for folder in FOLDERS):
        return False
    missing = missing_packages(path.read_text())
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
