"""The house as it was meant: importing the package is free of surprises, and rules are formulas."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FRAMEWORKS = ("numpy", "torch", "jax", "jaxlib", "optax", "triton", "matplotlib", "rich", "ml_dtypes", "safetensors")


def loaded_by(code: str) -> set[str]:
    """The frameworks that a fresh interpreter has loaded after running some code."""
    script = f"{code}\nimport sys\nprint(*(name for name in {FRAMEWORKS!r} if name in sys.modules))"
    return set(
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "frameworks"),
    [
        ("import thalweg, thalweg.rules, thalweg.settings, thalweg.boundary, thalweg.protocols", set()),
        ("import thalweg.integrations", set()),
        ("from thalweg.numpy import Kron; Kron(lr=0.1)", {"numpy"}),
        ("import thalweg.race, thalweg.plan, thalweg.check", set()),
        ("import thalweg.optax", {"jax", "jaxlib", "optax", "numpy", "ml_dtypes"}),
    ],
)
def test_nothing_is_loaded_that_is_not_used(code: str, frameworks: set[str]) -> None:
    for needed in frameworks & {"torch", "optax"}:
        pytest.importorskip(needed)
    assert loaded_by(code) <= frameworks


def test_the_torch_front_end_loads_kernels_for_gpus_when_a_gpu_is_stepped() -> None:
    pytest.importorskip("torch")
    own = "assert [m for m in sys.modules if m.startswith('thalweg.kernels.triton.')]"
    served = "['thalweg.kernels.triton.served']"  # which says what they serve, without Triton
    found = loaded_by(f"import sys, thalweg.torch\n{own} == {served}")
    assert found <= {"torch", "numpy", "triton"}  # Triton, where there is one, is loaded by torch.compiler


def test_importing_changes_no_setting_and_prints_nothing() -> None:
    script = (
        "import os, sys, warnings, random, threading\n"
        "def seen():\n"
        "    threads = threading.active_count()\n"
        "    return dict(os.environ), list(warnings.filters), random.getstate(), sys.getrecursionlimit(), threads\n"
        "before = seen()\n"
        "import thalweg, thalweg.rules, thalweg.settings, thalweg.boundary\n"
        "assert seen() == before\n"
        "import numpy\n"
        "before = seen(), numpy.geterr(), numpy.get_printoptions(), str(numpy.random.get_state())\n"
        "from thalweg.numpy import Kron\n"
        "opt = Kron(lr=0.1)\n"
        "opt.update('w', numpy.ones((3, 3)), numpy.eye(3))\n"
        "assert (seen(), numpy.geterr(), numpy.get_printoptions(), str(numpy.random.get_state())) == before\n"
    )
    result = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_rules_are_pure_formulas() -> None:
    """No rule asks for a framework, a dtype, a device or a generator, or changes anything in place."""
    assert (ROOT / "src/thalweg/py.typed").exists()
    words = ("import numpy", "import torch", "import jax", ".device", "random.", " += ", " -= ", " *= ", " /= ")
    for path in (ROOT / "src/thalweg/rules").glob("*.py"):
        assert [word for word in words if word in path.read_text()] == [], path.name


def test_every_file_of_the_package_is_used() -> None:
    """A module is imported, or named where others are imported by name; another file is named where it is read.

    Users import those that the docs import. The registry of rules imports its whole folder.
    """
    package = ROOT / "src" / "thalweg"
    endings = {".py", ".pyi", ".h", ".cpp", ".html", ".css", ".js", ".md", ".npz"}
    files = [path for path in package.rglob("*.*") if path.suffix in endings]
    pages = [ROOT / "README.md", ROOT / "CMakeLists.txt", ROOT / "pyproject.toml", *(ROOT / "docs").rglob("*.md")]
    texts = {path: path.read_text(encoding="utf-8") for path in [*files, *pages] if path.suffix not in (".npz", ".pyi")}
    for path in files:
        others = "\n".join(text for other, text in texts.items() if other != path)
        if path.suffix == ".pyi":
            used = path.with_suffix(".py") in files
        elif path.suffix == ".py" and path.parent.name != "rules":
            stem = path.parent.name if path.stem == "__init__" else path.stem
            folder = re.escape(".".join(path.relative_to(ROOT / "src").with_suffix("").parts[:-1]))
            imported = rf"{folder}(\.{stem}\b| import (\([^)]*\b{stem}\b|.*\b{stem}\b))"
            used = stem == path.parent.name or re.search(rf"{imported}|[\"}}.]{stem}\"", others) is not None
        else:
            word = path.stem if path.suffix == ".cpp" else path.name  # CMake has the names of these in a list
            used = path.suffix == ".py" or word in others
        assert used, f"nothing uses {path}"
