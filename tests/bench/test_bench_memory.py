"""The peak of memory, measured in a process of its own."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path

import own_rules
import pytest
from bench_cases import TINY, made_up
from lanes import one_in

from thalweg.bench.contestants import Contestant, Stepping
from thalweg.bench.memory import measure_in_process
from thalweg.bench.ours import enter
from thalweg.bench.peers import PEERS
from thalweg.bench.workload import Workload
from thalweg.kernels.cpu.library import reason_missing
from thalweg.plan.models import Model, Tensor
from thalweg.plan.optimizers import resolve_optimizer
from thalweg.show.arguments import Given
from thalweg.show.devices import Device

NUMPY_LAMB = next(c for c in enter("LAMB") if c.front_end == "numpy")
#: One tensor of 8 MiB, much more than what an interpreter does by the way.
ONE = Model("one", "", (Tensor("weight", (1024, 2048)),))

needs_proc = pytest.mark.skipif(
    sys.platform != "linux" or not Path("/proc/self/clear_refs").exists(), reason="the system tells it on Linux alone"
)


@pytest.mark.slow
@needs_proc
def test_what_a_step_allocates_is_seen() -> None:
    workload = Workload(ONE, Device())
    written_out = measure_in_process(workload, NUMPY_LAMB, Stepping(engine="reference"))
    assert written_out.extra is not None, written_out.how
    # moments, their roots and the update: at least two arrays of the size of the parameter at a time
    assert 2 * workload.nbytes < written_out.extra < 12 * workload.nbytes


@pytest.mark.nightly
@needs_proc
def test_what_a_step_does_not_allocate_is_not() -> None:
    if reason_missing() is not None:
        pytest.skip("needs the native core")
    workload = Workload(ONE, Device())
    fused = measure_in_process(workload, NUMPY_LAMB, Stepping(engine="fused"))
    assert fused.extra is not None, fused.how
    assert fused.extra < 0.1 * workload.nbytes


@pytest.mark.nightly
@needs_proc
def test_a_step_that_is_only_begun_is_waited_for() -> None:
    """JAX returns before its step is done; what its compiler set aside must be in the peak."""
    pytest.importorskip("optax")
    workload = Workload(ONE, Device())
    lars = next(c for c in PEERS if (c.rule, c.package) == ("LARS", "optax"))
    set_aside = lars.make(workload, Stepping()).compiled["temporary_bytes"]
    assert set_aside >= workload.nbytes
    measured = measure_in_process(workload, lars, Stepping())
    assert measured.extra is not None, measured.how
    assert measured.extra > 0.9 * set_aside


@pytest.mark.parametrize(
    ("contestant", "engine", "why"),
    one_in(2, [(made_up("nobody", []), "auto", "StopIteration"), (NUMPY_LAMB, "foreach", "engine")]),
)
def test_what_fails_there_is_a_reason_here(contestant: Contestant, engine: str, why: str) -> None:
    found = measure_in_process(Workload(TINY, Device()), contestant, Stepping(engine=engine))
    assert found.extra is None
    assert why in found.how


@pytest.mark.nightly
@needs_proc
def test_options_and_own_rules_are_known_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(inspect.getsourcefile(own_rules) or "").read_text()
    (tmp_path / "rules_of_mine.py").write_text(source)
    (tmp_path / "mixtures_of_mine.py").write_text(
        "import thalweg.torch as tt\n\ndef build(model, lr=0.1):\n    return tt.muon_adamw(model, lr=lr)\n"
    )
    monkeypatch.chdir(tmp_path)
    for reference, option in (("rules_of_mine:Signed", "beta"), ("LAMB", "eps")):
        name = resolve_optimizer(reference)
        one = next(c for c in enter(name, [Given("", option, 0.5)]) if c.front_end == "numpy")
        found = measure_in_process(Workload(TINY, Device()), one, Stepping())
        assert found.extra is not None, found.how
    if importlib.util.find_spec("torch"):
        (one,) = enter(resolve_optimizer("mixtures_of_mine:build"))
        found = measure_in_process(Workload(TINY, Device()), one, Stepping())
        assert found.extra is not None, found.how
