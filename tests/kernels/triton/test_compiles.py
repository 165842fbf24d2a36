"""Kernels compile for GPUs that are not here: NVIDIA's from sm_80 on, and one of AMD's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lanes import one_in

SCRIPT = Path(__file__).parents[2] / "support" / "compile_launches.py"
NARROW: dict[str, Any] = dict(
    dtype="bfloat16", rounding="stochastic", on_nonfinite="skip", tensor_rate=True, max_grad_norm=1.0
)
LEAN: dict[str, Any] = dict(state_dtype="int8", state_rounding="stochastic", rounding="compensated")

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("rule", "options"),
    one_in(
        8,
        [
            ("LARS", dict(weight_decay=0.1, nesterov=True, **NARROW)),
            ("LAMB", dict(weight_decay=0.1, trust_clip=[0.1, 2.0])),
            ("LAMB", dict(dtype="float16", state_dtype="float16")),
            ("Adafactor", dict(min_dim_size_to_factor=2, momentum=0.9, **NARROW)),
            ("Adafactor", dict(min_dim_size_to_factor=2, eps_mode="clamp", eps=[1e-3, 1e-3])),
            ("Kron", dict(precond_dtype="bfloat16", state_dtype="int8")),
            ("LAMB", dict(**LEAN, dtype="bfloat16", on_nonfinite="skip")),
            ("Adafactor", dict(**LEAN, min_dim_size_to_factor=2, momentum=0.9, dtype="float16")),
        ],
    ),
    ids=str,
)
def test_what_a_step_launches(rule: str, options: dict[str, Any]) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), rule, json.dumps(options)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    last = "kron_elements.step_kernel" if rule == "Kron" else "passes.settle_kernel"
    assert last in done.stdout.split(), done.stdout
