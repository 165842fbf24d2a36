"""What torch does not publish is used in one module, and every fallback there steps to the same numbers."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import thalweg

pytest.importorskip("torch")

SOURCE = Path(thalweg.__file__).parent
#: Not functions of torch's modules, but classes and parts of an optimizer that users' code relies on, too.
KNOWN = {"_ConvNd", "_ConvTransposeNd"}


def private_names(path: Path) -> set[str]:
    """The private names of torch that a file takes, but for the operations on lists."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            if re.match(r"(torch|nn|dist)\.", text) and node.attr.startswith("_"):
                found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found |= {part for part in parts if part.startswith("_")}
    return {name for name in found if not name.startswith(("_foreach_", "__"))} - KNOWN


def test_one_module_alone_takes_what_torch_does_not_publish() -> None:
    """But for the checks of any library's optimizers, which watch what torch does."""
    taken = {path: private_names(path) for path in SOURCE.rglob("*.py") if path.name != "private.py"}
    taken = {path: names for path, names in taken.items() if "check" not in path.parts}
    assert not {path: names for path, names in taken.items() if names}


@pytest.mark.slow
def test_every_fallback_steps_to_the_same_numbers() -> None:
    """The tests of what torch asks of optimizers, with what it publishes alone; make test-all takes all of torch's."""
    file = Path(__file__).with_name("test_torch_contract.py")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow"]
    given = {**os.environ, "THALWEG_TORCH_PRIVATE": "0"}
    script = (
        "import torch; from thalweg.torch import private; assert private.set_grad_enabled is torch.set_grad_enabled"
    )
    subprocess.run([sys.executable, "-c", script], env=given, check=True)
    told = subprocess.run([*command, str(file)], env=given, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout[-3000:]
