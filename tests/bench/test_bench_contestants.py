"""Everyone who takes part really steps: parameters move, and what is shared stays as it was."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
from bench_cases import TINY
from lanes import one_in
from tolerances import FLOAT32

from thalweg.bench.contestants import Contestant, Ready, Stepping
from thalweg.bench.devices import Cpu
from thalweg.bench.ours import FRONT_ENDS, OURS
from thalweg.bench.peers import PEERS
from thalweg.bench.rounds import silence
from thalweg.bench.rules import RULES
from thalweg.bench.workload import PERIOD, Workload, repeated
from thalweg.plan.models import Model, Tensor
from thalweg.show.published import PACKAGES, installed

EVERYONE = [contestant for contestant in (*OURS, *PEERS) if not contestant.device]
#: Rules that are compared with settings of their own; all others with their defaults, and without peers.
LISTED = {contestant.rule for contestant in OURS}


@contextlib.contextmanager
def uncompiled(contestant: Contestant) -> Iterator[None]:
    """Krons that compile themselves take a minute for it; the same code runs without."""
    with silence(contestant), warnings.catch_warnings():
        if not installed("torch"):
            yield
            return
        import torch

        warnings.simplefilter("ignore")
        with torch.compiler.set_stance("force_eager"):
            yield


def ready(contestant: Contestant, workload: Workload, stepping: Stepping | None = None) -> Ready:
    for package in {contestant.package, contestant.front_end} - {"thalweg"}:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    return contestant.make(workload, stepping or Stepping())


@pytest.mark.slow
@pytest.mark.parametrize("contestant", one_in(4, EVERYONE), ids=lambda c: f"{c.rule}: {c.name}")
def test_everyone_moves_its_parameters_and_nobody_elses(contestant: Contestant) -> None:
    workload = Workload(TINY, Cpu())
    with uncompiled(contestant):
        own = ready(contestant, workload)
        before = own.probe()
        for _ in range(3):
            own.prepare()
            own.step()
        after = own.probe()
    assert before == [float(x) for x in workload.numpy_params()["first"].flat[: len(before)]]
    assert all(np.isfinite(after))
    assert sum(a != b for a, b in zip(after, before, strict=True)) > len(before) / 2
    if contestant.front_end == "torch":  # gradients are shared, and some peers write into theirs
        for shared, first in zip(workload.torch_grads, workload.numpy_grads.values(), strict=True):
            np.testing.assert_array_equal(shared.numpy(), first)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_inner_steps_are_as_many_steps(front_end: str) -> None:
    contestant = next(c for c in OURS if (c.rule, c.front_end) == ("lamb", front_end))
    one, three = (ready(contestant, Workload(TINY, Cpu()), Stepping(inner=inner)) for inner in (1, 3))
    for _ in range(3):
        one.step()
    three.step()
    np.testing.assert_allclose(three.probe(), one.probe(), rtol=FLOAT32)


@pytest.mark.parametrize("front_end", ["torch", "numpy"])
def test_the_engine_asked_for_is_the_one_that_steps(front_end: str) -> None:
    contestant = next(c for c in OURS if (c.rule, c.front_end) == ("lamb", front_end))
    own = ready(contestant, Workload(TINY, Cpu()), Stepping(engine="reference"))
    own.step()
    assert own.engine() == "reference"


def test_the_compiler_tells_what_it_did() -> None:
    pytest.importorskip("optax")
    own = ready(next(c for c in PEERS if c.name == "optax.lamb, jax.jit"), Workload(TINY, Cpu()))
    assert own.compiled["compile_s"] > 0
    assert own.compiled["temporary_bytes"] >= 0


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_bfloat16(front_end: str) -> None:
    pytest.importorskip("ml_dtypes")
    contestant = next(c for c in OURS if (c.rule, c.front_end) == ("lars", front_end))
    workload = Workload(TINY, Cpu(), "bfloat16")
    own = ready(contestant, workload)
    before = own.probe()
    assert before == [float(x) for x in workload.numpy_params()["first"].flat[: len(before)]]
    for _ in range(50):
        own.step()
    assert own.probe() != before


def test_names_rules_and_packages_are_known() -> None:
    assert len({(c.rule, c.name) for c in EVERYONE}) == len(EVERYONE)
    assert {c.rule for c in EVERYONE} == LISTED <= set(RULES)
    assert {c.package for c in PEERS} == set(PACKAGES)
    assert all(c.copies >= 1 for c in EVERYONE)


def test_ours_come_in_every_front_end_with_the_same_settings() -> None:
    for rule in LISTED:
        assert [c.front_end for c in OURS if c.rule == rule and not c.device] == list(FRONT_ENDS)
    lamb = {}
    for contestant in (c for c in OURS if c.rule == "lamb" and not c.device and installed(c.front_end)):
        own = ready(contestant, Workload(TINY, Cpu()))
        own.step()
        lamb[contestant.name] = own.probe()
    for probe in lamb.values():
        np.testing.assert_allclose(probe, next(iter(lamb.values())), rtol=FLOAT32)


def test_torch_s_adamw_is_the_control_everywhere() -> None:
    controls = [c for c in PEERS if c.name == "torch.optim.AdamW(fused=True)"]
    assert sorted(c.rule for c in controls) == sorted(LISTED)
    assert {c.own_rule for c in controls} == {"adamw"}


def test_parameters_are_the_same_numbers_in_new_memory() -> None:
    workload = Workload(TINY, Cpu())
    one, other = workload.numpy_params(), workload.numpy_params()
    for name, tensor in zip(one, TINY.tensors, strict=True):
        assert one[name].shape == tensor.shape
        np.testing.assert_array_equal(one[name], other[name])
        assert not np.shares_memory(one[name], other[name])
    assert workload.numpy_grads is workload.numpy_grads
    assert workload.nbytes == 4 * TINY.parameters


def test_numbers_repeat_but_rows_do_not() -> None:
    numbers = np.arange(7, dtype=np.float32)
    np.testing.assert_array_equal(repeated(numbers, (3, 4)), np.resize(numbers, (3, 4)))
    assert repeated(numbers, ()).shape == ()
    assert repeated(numbers, (0, 3)).size == 0
    wide = Workload(Model("wide", "", (Tensor("w", (3, PERIOD // 2)),)), Cpu()).numpy_params()["w"]
    assert not np.array_equal(wide[0], wide[2])
    assert 0.019 < wide.std() < 0.021


@pytest.mark.slow
def test_timm_is_loaded_without_what_it_would_import() -> None:
    """By its own files where torchvision is missing; this process must not be the one that finds out."""
    pytest.importorskip("torch")
    if not installed("timm") or installed("torchvision"):
        pytest.skip("needs timm without torchvision")
    program = (
        "import sys\n"
        "from thalweg.bench.peers import published\n"
        "import torch\n"
        "made = published('timm', 'LAMB', lr=0.1)([torch.nn.Parameter(torch.ones(2))])\n"
        "assert type(made).__name__ == 'Lamb' and 'timm.models' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
