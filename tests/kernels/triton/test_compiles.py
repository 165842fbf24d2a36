"""Kernels compile for GPUs that are not here: NVIDIA's from sm_80 on, and one of AMD's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from day import BY_DAY

SCRIPT = Path(__file__).parents[2] / "support" / "compile_launches.py"
NARROW: dict[str, Any] = dict(
    dtype="bfloat16", rounding="stochastic", on_nonfinite="skip", tensor_rate=True, max_grad_norm=1.0
)
LEAN: dict[str, Any] = dict(state_dtype="int8", state_rounding="stochastic", rounding="compensated")

#: What a step launches: by day the first for every kind of GPU, and three others for one.
STEPS: list[tuple[str, dict[str, Any]]] = [
    ("LARS", dict(weight_decay=0.1, nesterov=True, **NARROW)),
    ("Kron", dict(precond_dtype="bfloat16", state_dtype="int8")),
    ("LAMB", dict(**LEAN, dtype="bfloat16", on_nonfinite="skip")),
    ("Adafactor", dict(**LEAN, min_dim_size_to_factor=2, momentum=0.9, dtype="float16")),
    ("Adafactor", dict(min_dim_size_to_factor=2, momentum=0.9, **NARROW)),
    ("Adafactor", dict(min_dim_size_to_factor=2, eps_mode="clamp", eps=[1e-3, 1e-3])),
    ("LAMB", dict(weight_decay=0.1, trust_clip=[0.1, 2.0])),
    ("LAMB", dict(dtype="float16", state_dtype="float16")),
]
SOON: dict[str, Any] = {"targets": ["sm_90"]}
#: State of many kinds, in kernels of which enough programs must run at a time.
STATES: list[dict[str, Any]] = [
    dict(state_dtype="bfloat16", state_rounding="stochastic"),
    dict(state_dtype="int8"),
    dict(state_dtype="float32"),
    dict(state_dtype="bfloat16"),
]

pytestmark = pytest.mark.slow


def compile_launches(cases: list[tuple[str, dict[str, Any]]]) -> list[dict[str, int]]:
    """The registers of what steps launch, by kernel, in a process of its own: here kernels are interpreted."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), json.dumps(cases)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    failed = [f"{case}: {raised}" for case, raised in zip(cases, found, strict=True) if isinstance(raised, str)]
    assert not failed, "\n".join(failed)
    return found  # type: ignore[no-any-return]


def test_what_a_step_launches() -> None:
    cases = [STEPS[0], *((rule, {**options, **SOON}) for rule, options in STEPS[1:4])] if BY_DAY else STEPS
    for (rule, options), found in zip(cases, compile_launches(cases), strict=True):
        last = "derived_krontaken" if rule == "Kron" else "stages.settle_kernel"
        assert any(name.startswith(last) for name in found), (rule, options)


def test_registers_are_left_for_enough_programs() -> None:
    """Of 65536, for five programs of 128 threads at least: with fewer, too little is read at a time."""
    states = STATES[:2] if BY_DAY else STATES
    cases = [("AdamW", {**state, **SOON, "dtype": "bfloat16"}) for state in states]
    for state, found in zip(states, compile_launches(cases), strict=True):
        passes = {name: registers for name, registers in found.items() if name.endswith(".pass_0")}
        assert passes, state
        assert max(passes.values()) <= 96, (state, found)
        # a thread has 16 elements of each array, so that it reads as often as these have bytes
        width = {"float32": 4, "bfloat16": 2, "int8": 1}[state["state_dtype"]]
        assert min(found[f"{name} in 16 bytes"] for name in passes) >= 2 + 2 + 2 * width, (state, found)


def test_what_calls_from_xla_launch() -> None:
    """Recorded and compiled without torch."""
    script = """
        import functools, sys
        from types import SimpleNamespace
        from thalweg.kernels.products.choices import SMALL
        from thalweg.kernels.products.xla import launch_product
        from thalweg.kernels.triton import xla
        from thalweg.rules.rule import stand_in
        from thalweg.rules import RULES
        from thalweg.settings import RuleOptions
        from thalweg.storage import describe_state

        library = SimpleNamespace(thalweg_plan=lambda *plan: None)

        def compile_calls(name, dtype, **options):
            setting, shapes = RuleOptions(RULES[name], options, None, []).base, [(256, 512), (768, 64)]
            states = [describe_state(setting.stored_rule, setting.numerics, shape, dtype) for shape in shapes]
            facts = ["a", "b"], shapes, (dtype, "float32"), states, 1.0, True, False
            own = xla.Parameters(stand_in(setting.stored_rule), setting.numerics, *facts)
            found = xla.record(own, functools.partial(xla.compile_for, 90), observed=False)
            return len({xla.register(library, call, found.inputs, found.addresses) for call in found.calls})

        assert compile_calls("LAMB", "float32", exempt=None) == 1
        assert compile_calls("AdamW", "bfloat16", state_dtype="int8", rounding="stochastic") == 1
        assert compile_calls("Adafactor", "bfloat16", on_nonfinite="skip") == 2
        x, r = ((3, 1536, 640), "bfloat16"), ((3, 640, 640), "bfloat16")
        compiled = functools.partial(xla.compile_for, 90)
        own = launch_product(compiled, [x, x, r], (True, False), (1.0, 1.0), SMALL, 132, symmetric=True)
        plus = launch_product(compiled, [x, r, x, x], (False, False), (1.0, 3.0), SMALL, 132, symmetric=False)
        assert (own.grid[0], plus.grid[0], len(plus.arguments)) == (45, 180, 34)
        assert len({xla.register(library, [each], 2) for each in (own, plus)}) == 2
        assert "torch" not in sys.modules
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=environment, check=True, timeout=240)
