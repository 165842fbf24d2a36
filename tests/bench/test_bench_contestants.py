"""Everyone who takes part really steps: parameters move, and what is shared stays as it was."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_cases import TINY
from lanes import one_in
from tolerances import FLOAT32

from thalweg.bench.contestants import Contestant, Ready, Stepping, ready_numpy, ready_torch
from thalweg.bench.ours import count_floor, enter
from thalweg.bench.peers import PEERS
from thalweg.bench.rounds import silence
from thalweg.bench.workload import PERIOD, Workload, repeat
from thalweg.errors import CommandError
from thalweg.plan.models import Model, Tensor
from thalweg.plan.optimizers import resolve_optimizer
from thalweg.plan.planning import FRONT_ENDS
from thalweg.rules import RULES
from thalweg.show.arguments import Given
from thalweg.show.devices import Device
from thalweg.show.published import is_installed
from thalweg.show.registered import MIXTURES, OWN_MIXTURES, is_mixture

OURS = [contestant for name in (*RULES, *MIXTURES) for contestant in enter(name)]
EVERYONE = [*OURS, *PEERS]
#: JAX compiles for seconds.
by_night = [pytest.param(each, marks=pytest.mark.nightly if each == "optax" else ()) for each in FRONT_ENDS]


@contextlib.contextmanager
def uncompiled(contestant: Contestant) -> Iterator[None]:
    """Krons that compile themselves take a minute for it; the same code runs without."""
    with silence(contestant), warnings.catch_warnings():
        if not is_installed("torch"):
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


@pytest.mark.nightly
@pytest.mark.parametrize("contestant", one_in(4, EVERYONE), ids=lambda c: f"{c.rule}: {c.name}")
def test_everyone_moves_its_parameters_and_nobody_elses(contestant: Contestant) -> None:
    workload = Workload(TINY, Device())
    with uncompiled(contestant):
        own = ready(contestant, workload)
        before = own.probe()
        for _ in range(3):
            own.prepare()
            own.step()
        after = own.probe()
    assert before == [float(x) for x in workload.params("numpy")["first"].flat[: len(before)]]
    assert all(np.isfinite(after))
    assert sum(a != b for a, b in zip(after, before, strict=True)) > len(before) / 2
    if contestant.front_end == "torch":  # gradients are shared, and some peers write into theirs
        for grads in workload.grads("torch"):
            for shared, first in zip(grads, workload.grads("numpy")[0].values(), strict=True):
                np.testing.assert_array_equal(shared.numpy(), first)


@pytest.mark.parametrize("front_end", by_night)
def test_inner_steps_are_as_many_steps(front_end: str) -> None:
    contestant = next(c for c in OURS if (c.rule, c.front_end) == ("LAMB", front_end))
    engine = "auto" if front_end == "optax" else "reference"
    one, three = (ready(contestant, Workload(TINY, Device()), Stepping(inner=n, engine=engine)) for n in (1, 3))
    for own in (one, three):
        own.prepare()
    for _ in range(3):
        one.step()
    three.step()
    np.testing.assert_allclose(three.probe(), one.probe(), rtol=FLOAT32)
    if front_end != "optax":
        assert one.engine() == "reference", "the one that was asked for"


@pytest.mark.nightly
def test_the_compiler_tells_what_it_did() -> None:
    pytest.importorskip("optax")
    own = ready(next(c for c in PEERS if c.name == "optax.lamb, jax.jit"), Workload(TINY, Device()))
    assert own.compiled["compile_s"] > 0
    assert own.compiled["temporary_bytes"] >= 0


@pytest.mark.parametrize("front_end", by_night)
def test_bfloat16(front_end: str) -> None:
    pytest.importorskip("ml_dtypes")
    contestant = next(c for c in OURS if (c.rule, c.front_end) == ("LARS", front_end))
    workload = Workload(TINY, Device(), "bfloat16")
    own = ready(contestant, workload)
    before = own.probe()
    assert before == [float(x) for x in workload.params("numpy")["first"].flat[: len(before)]]
    for _ in range(50):
        own.prepare()
        own.step()
    assert own.probe() != before


@pytest.mark.parametrize("moving", [True, False])
@pytest.mark.parametrize("writes", [False, True])
def test_gradients_move_in_torch_unless_they_are_to_stay(moving: bool, writes: bool) -> None:
    torch = pytest.importorskip("torch")
    seen: list[list[Any]] = []

    class Watching(torch.optim.SGD):  # type: ignore[misc,name-defined]
        def step(self) -> None:  # type: ignore[override]
            grads = [p.grad for p in self.param_groups[0]["params"]]
            assert all(map(torch.equal, grads, workload.grads("torch")[0])), "the same numbers in every step"
            seen.append(grads)
            for g in grads if writes else ():
                g.mul_(2)

    workload = Workload(TINY, Device())
    stepping = Stepping(moving_grads=moving)
    own = ready_torch(lambda params: Watching(params, lr=0.1), workload, stepping, writes_grads=writes)
    for _ in range(3):
        own.prepare()
        own.step()
    for one, other in itertools.pairwise(seen):
        for a, b in zip(one, other, strict=True):
            assert (a is not b and a.data_ptr() != b.data_ptr()) == moving


@pytest.mark.parametrize("moving", [True, False])
def test_gradients_move_in_numpy(moving: bool) -> None:
    seen: list[Any] = []

    class Watching:
        engine = "none"

        def step(self, params: Any, grads: Any) -> None:
            seen.append(grads["first"])

    own = ready_numpy(Watching(), Workload(TINY, Device()), Stepping(moving_grads=moving))
    for _ in range(3):
        own.prepare()
        own.step()
    for a, b in itertools.pairwise(seen):
        np.testing.assert_array_equal(a, b)
        assert (a is not b and not np.shares_memory(a, b)) == moving


@pytest.mark.parametrize(("rule", "copies"), [("SGD", 2), ("AdamW", 3), ("LARS", 2), ("Adafactor", 1), ("Kron", 4)])
def test_copies_that_ours_keep(rule: str, copies: int) -> None:
    assert {c.copies for c in enter(rule)} == {copies}


@pytest.mark.slow
def test_ours_come_in_every_front_end_with_the_same_settings() -> None:
    assert len({c.name for c in EVERYONE}) == len(EVERYONE)
    for rule in RULES:
        assert [c.front_end for c in enter(rule)] == list(FRONT_ENDS)
    probes = []
    for contestant in (c for c in enter("LAMB") if is_installed(c.front_end)):
        own = ready(contestant, Workload(TINY, Device()))
        own.prepare()
        own.step()
        probes.append(own.probe())
        np.testing.assert_allclose(probes[-1], probes[0], rtol=FLOAT32)


def test_optimizers_by_name_class_and_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    assert [resolve_optimizer(name) for name in ("lamb", "AdamW", "Muon_AdamW")] == ["LAMB", "AdamW", "muon_adamw"]
    assert resolve_optimizer(RULES["LARS"]) == "LARS"
    (tmp_path / "built_mixture.py").write_text(
        "import thalweg.torch as tt\n\ndef build(model, lr=0.1):\n    return tt.muon_adamw(model, lr=lr)\n"
    )
    monkeypatch.chdir(tmp_path)
    OWN_MIXTURES.clear()
    name = resolve_optimizer("built_mixture:build")
    assert name == "build"
    assert is_mixture(name)
    with pytest.raises(CommandError, match="there is no optimizer 'muon_adam': did you mean 'muon_adamw'"):
        resolve_optimizer("muon_adam")
    pytest.importorskip("torch")
    (contestant,) = enter(name, [Given(name, "lr", 0.5)])
    own = ready(contestant, Workload(TINY, Device()))
    before = own.probe()
    own.prepare()
    own.step()
    assert own.probe() != before


def test_options_are_for_those_that_have_them() -> None:
    given = [Given("", "betas", (0.8, 0.9)), Given("LAMB", "weight_decay", 0.5)]
    assert next(enter("LAMB", given)).options == dict(lr=1e-3, betas=(0.8, 0.9), weight_decay=0.5)
    assert next(enter("SGD", given)).options == dict(lr=1e-3, momentum=0.9)
    with pytest.raises(CommandError, match=r"AdamW: .*betas"):
        next(enter("AdamW", [Given("", "betas", (2.0, 0.9))]))
    model = Model("one", "", (Tensor("weight", (4096, 4096)),))
    assert count_floor("LAMB", dict(lr=1e-3), model) == 40 * model.parameters
    assert count_floor("AdamW", dict(lr=1e-3, state_dtype="bfloat16"), model) == 20 * model.parameters
    assert count_floor("Kron", {}, model) is None


def test_parameters_are_the_same_numbers_in_new_memory() -> None:
    workload = Workload(TINY, Device())
    one, other = workload.params("numpy"), workload.params("numpy")
    for name, tensor in zip(one, TINY.tensors, strict=True):
        assert one[name].shape == tensor.shape
        np.testing.assert_array_equal(one[name], other[name])
        assert not np.shares_memory(one[name], other[name])
    assert workload.grads("numpy") is workload.grads("numpy")
    assert workload.nbytes == 4 * TINY.parameters


def test_numbers_repeat_but_rows_do_not() -> None:
    numbers = np.arange(7, dtype=np.float32)
    np.testing.assert_array_equal(repeat(numbers, (3, 4)), np.resize(numbers, (3, 4)))
    assert repeat(numbers, ()).shape == ()
    assert repeat(numbers, (0, 3)).size == 0
    wide = Workload(Model("wide", "", (Tensor("w", (3, PERIOD // 2)),)), Device()).params("numpy")["w"]
    assert not np.array_equal(wide[0], wide[2])
    assert 0.019 < wide.std() < 0.021


@pytest.mark.nightly
def test_timm_is_loaded_without_what_it_would_import() -> None:
    """By its own files where torchvision is missing; this process must not be the one that finds out."""
    pytest.importorskip("torch")
    if not is_installed("timm") or is_installed("torchvision"):
        pytest.skip("needs timm without torchvision")
    program = (
        "import sys\n"
        "from thalweg.bench.peers import PEERS\n"
        "from thalweg.bench.contestants import Stepping\n"
        "from thalweg.bench.workload import Workload\n"
        "from thalweg.plan.models import Model, Tensor\n"
        "from thalweg.show.devices import Device\n"
        "lamb = next(c for c in PEERS if c.name == 'timm Lamb')\n"
        "lamb.make(Workload(Model('one', '', (Tensor('w', (2,)),)), Device()), Stepping())\n"
        "assert 'timm.optim.lamb' in sys.modules and 'timm.models' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
