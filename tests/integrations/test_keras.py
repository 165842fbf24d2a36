"""Optimizers for Keras, beside the real package: each backend in a process of its own."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

os.environ.setdefault("KERAS_BACKEND", "jax")  # Keras looks for tensorflow else

import keras

RUNS = Path(__file__).with_name("keras_runs.py")
CHECKS = re.findall(r"^def (check_\w+)", RUNS.read_text(), re.MULTILINE)


def child(*arguments: str, backend: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "KERAS_BACKEND": backend, "JAX_ENABLE_X64": "0"}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


@functools.cache
def failures(backend: str) -> dict[str, str]:
    result = child(str(RUNS), backend, backend=backend)
    assert result.returncode == 0, result.stderr
    found: dict[str, str] = json.loads(result.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_keras(backend: str, check: str) -> None:
    assert check not in failures(backend), failures(backend)[check]


def test_optimizers_are_those_of_keras() -> None:
    from thalweg.integrations.keras import LAMB

    assert isinstance(keras.optimizers.get(LAMB(0.1)), keras.optimizers.Optimizer)


def test_other_backends_are_refused() -> None:
    result = child("-c", "import thalweg.integrations.keras", backend="numpy")
    assert "steps on the backends jax and torch, and Keras has 'numpy'" in result.stderr
