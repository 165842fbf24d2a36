"""Options reach kernels: those made from a rule have all of them, those written by hand say which they read."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import thalweg.numpy
from thalweg import rules
from thalweg.kernels import triton
from thalweg.kernels.cpu.library import reason_missing
from thalweg.kernels.triton.served import reason_against
from thalweg.rules import Rule, refresh
from thalweg.settings import Handling, Setting

needs_core = pytest.mark.skipif(reason_missing() is not None, reason="there is no native core here")


@pytest.mark.parametrize("kind", triton.READS, ids=lambda kind: kind.__name__)
def test_every_option_of_a_rule_is_read(kind: type[Rule]) -> None:
    """A new option is to be read by kernels written by hand: until then no engine uses them."""
    assert sorted(triton.READS[kind].split()) == sorted(f.name for f in fields(kind))


@pytest.mark.parametrize("kind", triton.READS, ids=lambda kind: kind.__name__)
def test_kernels_for_gpus_name_what_they_are_said_to_read(kind: type[Rule]) -> None:
    folder = Path(inspect.getfile(triton)).parent
    files = [*folder.glob(f"{kind.__name__.lower()}*.py"), folder / "passes.py", folder / "tables.py"]
    files += [Path(inspect.getfile(refresh))]  # of whose functions kernels are made
    named = set(re.findall(r"rule\.(\w+)", "".join(path.read_text() for path in files)))
    while methods := [name for name in named if inspect.isfunction(getattr(kind, name, None))]:
        named -= set(methods)
        named |= {name for m in methods for name in re.findall(r"self\.(\w+)", inspect.getsource(getattr(kind, m)))}
    assert named >= set(triton.READS[kind].split())


@dataclass(frozen=True, kw_only=True)
class LAMB(rules.LAMB):
    """LAMB with an option that no kernel knows, and that changes nothing unless it is set."""

    toy: float = 0.0

    def update(self, xp: Any, g: Any, s: Any, p: Any, **given: Any) -> Any:
        update = super().update(xp, g, s, p, **given)
        return update._replace(delta=update.delta + self.toy)


@dataclass(frozen=True, kw_only=True)
class Adafactor(rules.Adafactor):
    toy: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Kron(rules.Kron):
    toy: float = 0.0


@needs_core
@pytest.mark.parametrize("toy", [0.0, 0.5])
class TestAnOptionThatARuleAdds:
    @pytest.mark.slow
    def test_numpy(self, toy: float) -> None:
        w, g = np.ones((3, 4)), np.full((3, 4), 0.5)
        optimizer = thalweg.numpy.optimizer(LAMB)(0.1, toy=toy)
        optimizer.step({"w": w}, {"w": g})
        assert optimizer.engine == "fused"
        assert np.allclose(w, 0.9 + toy)

    def test_torch(self, toy: float) -> None:
        torch = pytest.importorskip("torch")
        import thalweg.torch

        w = torch.nn.Parameter(torch.ones(3, 4))
        w.grad = torch.full((3, 4), 0.5)
        optimizer = thalweg.torch.optimizer(LAMB)([w], lr=0.1, toy=toy)
        optimizer.step()
        assert optimizer.engine == "fused"
        assert torch.allclose(w, torch.full((3, 4), 0.9 + toy))

    def test_kernels_for_gpus(self, toy: float) -> None:
        reason = reason_against(Setting(Kron(toy=toy), Handling()), (3, 4), "float32", {})
        assert reason == "there is no fused kernel of Kron with the option toy"
        # kernels that are made from a rule know every option of it
        for rule in (LAMB(toy=toy), Adafactor(toy=toy), Adafactor(toy=toy, min_dim_size_to_factor=2)):
            assert reason_against(Setting(rule, Handling()), (3, 4), "float32", {}) == ""
