"""Importing the package is free of surprises, and what somebody types first is answered by the package itself."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

import thalweg
from thalweg.rules import RULES

FRAMEWORKS = ("numpy", "torch", "jax", "jaxlib", "optax", "triton", "matplotlib", "rich", "ml_dtypes", "safetensors")


def answer(code: str) -> str:
    """The last line that a fresh interpreter says to some code, on either stream; it may be empty."""
    command = [sys.executable, "-W", "error", "-c", f"import sys\n{code}"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return ("\n" + ended.stdout + ended.stderr).rstrip("\n").rpartition("\n")[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "frameworks"),
    [
        ("import thalweg, thalweg.rules, thalweg.settings, thalweg.boundary, thalweg.protocols", set()),
        ("import thalweg.integrations", set()),
        ("import thalweg; thalweg.numpy.Kron(lr=0.1); from thalweg.numpy import LAMB", {"numpy"}),
        ("import thalweg.race, thalweg.plan, thalweg.check", set()),
        (
            "import thalweg; thalweg.optax.lamb; from thalweg import optax",
            {"jax", "jaxlib", "optax", "numpy", "ml_dtypes"},
        ),
        (
            "import thalweg; thalweg.torch.LAMB; from thalweg import torch",
            {"torch", "numpy", "triton"},
        ),  # Triton is loaded by torch.compiler
    ],
)
def test_front_ends_are_loaded_when_they_are_asked_for_and_nothing_that_is_not_used(
    code: str, frameworks: set[str]
) -> None:
    for needed in frameworks & {"torch", "optax"}:
        pytest.importorskip(needed)
    own = "[name for name in sys.modules if name.startswith('thalweg.kernels.triton.')]"
    told = answer(f"{code}\nprint('loaded', *(name for name in {FRAMEWORKS!r} if name in sys.modules), *{own})")
    assert told.startswith("loaded")
    # the last says what kernels for GPUs serve; they are loaded when a GPU is stepped
    assert {*told.split()[1:]} <= {*frameworks, "thalweg.kernels.triton.admission"}


def test_importing_changes_no_setting_and_prints_nothing() -> None:
    script = (
        "import os, warnings, random, threading\n"
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
    assert answer(script) == ""


def test_an_optimizer_asked_of_the_package_is_told_where_it_is() -> None:
    for name in [*RULES, *(rule.lower() for rule in RULES)]:
        told = re.escape(f"thalweg has no {name!r} of its own: ")
        for way in ("from thalweg.torch import ", "thalweg.numpy.", "thalweg.optax."):
            with pytest.raises(AttributeError, match=f"{told}.*{re.escape(way)}"):
                getattr(thalweg, name)
    with pytest.raises(ImportError, match="thalweg has no 'LAMB' of its own: "):
        exec("from thalweg import LAMB")
    with pytest.raises(ImportError, match="cannot import name 'nonsense' from 'thalweg'"):
        exec("from thalweg import nonsense")


def test_tools_that_look_around_are_not_disturbed() -> None:
    assert "__version__" in dict(inspect.getmembers(thalweg))
    assert inspect.getmodule(thalweg.OptimError) is importlib.import_module("thalweg.errors")
    assert doctest.DocTestFinder().find(thalweg, "thalweg") is not None
    assert pickle.loads(pickle.dumps(thalweg.OptionError("x"))).args == ("x",)
    assert {"numpy", "torch", "optax"} <= set(dir(thalweg))
    for name in ("__path__", "__wrapped__", "__file__"):
        assert hasattr(thalweg, name) == (name in vars(thalweg))


@pytest.mark.parametrize(("front_end", "package"), [("torch", "torch"), ("optax", "jax"), ("optax", "optax")])
def test_a_front_end_whose_framework_is_missing_says_what_to_install(front_end: str, package: str) -> None:
    pytest.importorskip(front_end)
    without = f"sys.modules[{package!r}] = None\nimport thalweg\n"
    told = answer(f"{without}assert not hasattr(thalweg, {front_end!r})\nthalweg.{front_end}")
    needed = "torch" if front_end == "torch" else "jax"
    missing = f'thalweg.{front_end} needs {package}, which is not installed: pip install "thalweg[{needed}]"'
    assert told == f"AttributeError: {missing}"


def test_a_framework_that_is_broken_is_not_said_to_be_missing() -> None:
    """What an installed framework lacks for itself is told as Python tells it."""
    pytest.importorskip("torch")
    told = answer("sys.modules['torch._C'] = None\nimport thalweg\nthalweg.torch")
    assert told.startswith("ModuleNotFoundError: ")
    assert "torch._C" in told


def test_contributing_names_files_that_are_there() -> None:
    root = Path(__file__).resolve().parents[1]
    page = (root / "CONTRIBUTING.md").read_text("utf-8")
    named = set(re.findall(r"[\w/]+\.(?:py|txt|cpp|h)\b", page))
    files = [path for folder in ("src", "tests", "tools") for path in (root / folder).rglob("*.*")]
    there = [f"/{path.relative_to(root).as_posix()}" for path in files]
    assert len(named) > 40
    assert not {name for name in named if not any(path.endswith(f"/{name}") for path in there)}
