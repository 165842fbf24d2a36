"""Without the native library, with one of another version, and with settings that cannot be met."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from side_by_side import made, needs_core

from thalweg.errors import OptionError
from thalweg.kernels.cpu import library

COMPILER = next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)


def test_where_there_is_a_compiler_there_is_a_library() -> None:
    """All other tests of native code are skipped without one: that must not go unnoticed."""
    if COMPILER is None:
        pytest.skip("there is no C++ compiler")
    assert library.is_here()


def run(script: str, **environment: str) -> str:
    """What a process of its own prints. Warnings are shown there, always."""
    result = subprocess.run(
        [sys.executable, "-W", "always", "-c", script],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


COMMON = """
import warnings
import numpy as np
from thalweg import OptionError

def count(function):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        function()
    for warning in seen:
        print(warning.category.__name__, warning.message)
    print(len(seen))

def refused(make):
    try:
        make()
    except OptionError as error:
        print(error)
"""

IN_NUMPY = """
from thalweg.numpy import LARS, LAMB, Adafactor, Kron

def steps(engine="auto"):
    results = []
    for make in (LARS, LAMB, Adafactor):
        optimizer = make(lr=0.1, engine=engine, max_grad_norm=1.0)
        weights = {"w": np.linspace(1, 2, 600).reshape(20, 30), "v": np.ones(3, "float32")}
        for _ in range(2):
            optimizer.step(weights, {"w": np.linspace(-1, 1, 600).reshape(20, 30), "v": np.ones(3, "float32")})
        make(lr=0.1, engine=engine).update("u", np.ones(2), np.ones(2))
        assert optimizer.engine == "reference", optimizer.engine
        results.append([x.tobytes() for x in weights.values()])
    return results

count(lambda: (steps("reference"), Kron(0.1, engine="reference")))
count(steps)
count(steps)
assert steps() == steps("reference")
for make in (LARS, LAMB, Adafactor):
    refused(lambda: make(lr=0.1, engine="fused"))
"""

IN_TORCH = """
import torch
from thalweg.torch import LARS, LAMB, Adafactor

def steps():
    for make in (LARS, LAMB, Adafactor):
        p = torch.nn.Parameter(torch.ones(3, 4))
        optimizer = make([p], lr=0.1)
        for _ in range(2):
            p.grad = torch.ones(3, 4)
            optimizer.step()
        assert optimizer.engine in ("reference", "foreach"), optimizer.engine
        assert (p < 1).all()

print(0)  # nobody has asked for the reference
count(steps)
count(steps)
for make in (LARS, LAMB, Adafactor):
    refused(lambda: make([torch.nn.Parameter(torch.ones(3))], lr=0.1, engine="fused"))
"""


REASON = (
    "from thalweg.errors import refusal\nfrom thalweg.kernels.cpu.library import load\nprint(refusal(load) or None)"
)


class TestNoLibrary:
    @pytest.mark.parametrize(
        "script",
        [
            IN_NUMPY,
            pytest.param(
                IN_TORCH,
                marks=pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed"),
            ),
        ],
        ids=["numpy", "torch"],
    )
    def test_steps_go_on_by_the_reference_one_warning_says_so_and_who_insists_is_refused(self, script: str) -> None:
        told = run(COMMON + script, THALWEG_CPU_LIBRARY="/nowhere/libcore.so").splitlines()
        silent, warning, *counts = told[:4]
        assert (silent, counts) == ("0", ["1", "0"])
        assert warning.startswith("FallbackWarning thalweg's native CPU core is not available (it was not built: ")
        assert "no libcore.so in /nowhere" in warning
        assert len(told) == 7
        assert all("engine='fused' cannot run: it was not built: there is no libcore.so" in line for line in told[4:])

    def test_a_file_that_is_no_library(self, tmp_path: Path) -> None:
        broken = tmp_path / "broken.so"
        broken.write_bytes(b"this is no library")
        assert run(REASON, THALWEG_CPU_LIBRARY=str(broken)).startswith("broken.so cannot be loaded: ")

    def test_a_library_of_somebody_else(self) -> None:
        import _ctypes

        told = run(REASON, THALWEG_CPU_LIBRARY=getattr(_ctypes, "__file__", ""))
        assert "cannot be loaded" in told
        assert "thalweg_sizeof" in told


#: A structure of Python's, the last of all, that has become longer than the library's.
ANOTHER_VERSION = """
from thalweg.kernels.cpu import structs
class Longer(structs.ALL[-1]):
    _fields_ = (("more", structs.c_int64),)
structs.ALL = (*structs.ALL[:-1], Longer)
from thalweg.numpy import LAMB
refused(lambda: LAMB(0.1, engine="fused"))
"""


@needs_core
class TestAnotherLibrary:
    def test_of_another_version_is_refused(self) -> None:
        told = run(COMMON + ANOTHER_VERSION)
        assert re.search("engine='fused' cannot run: .* belongs to another version", told)

    def test_a_width_may_be_chosen_that_the_machine_has(self) -> None:
        every = library.levels(library.load())
        assert {run(REASON, THALWEG_CPU_LEVEL=level) for level in every} == {"None\n"}
        told = run(REASON, THALWEG_CPU_LEVEL="avx1024")
        assert f"THALWEG_CPU_LEVEL must be one of {every[0]}" in told


@needs_core
def test_an_optimizer_tells_which_engine_it_used() -> None:
    with pytest.raises(OptionError, match="engine must be one of 'auto', 'reference', 'fused', got 'foreach'"):
        made("LAMB", "foreach")
    optimizer = made("LAMB", "auto")
    assert optimizer.engine == "auto"
    optimizer.update("w", np.ones(3), np.ones(3))
    assert optimizer.engine == "fused"
    fortran = np.asfortranarray(np.ones((3, 3)))
    optimizer.update("f", fortran, np.ones((3, 3)))
    assert optimizer.engine == "reference"
    optimizer.step({"w": np.ones(3), "f": fortran}, {"w": np.ones(3), "f": np.ones((3, 3))})
    assert optimizer.engine == "fused + reference"
    assert "engine" not in repr(optimizer)
    assert repr(made("LAMB", "fused")).endswith("engine='fused')")
