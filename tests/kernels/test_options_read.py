"""Kernels written by hand say which options they read, and serve no rule that has another."""

from __future__ import annotations

import importlib.util
import inspect
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import thalweg.numpy
from thalweg import rules
from thalweg.errors import OptionError
from thalweg.kernels import triton
from thalweg.kernels.cpu import options as native
from thalweg.kernels.cpu.library import reason_missing
from thalweg.kernels.cpu.plan import Operand, Options, layout_of, rows_of
from thalweg.rules import RULES, Rule
from thalweg.settings import Handling

needs_core = pytest.mark.skipif(reason_missing() is not None, reason="there is no native core here")
READERS = {"native": native.READS, "triton": triton.READS}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", RULES)
def test_every_option_of_a_rule_is_read(reader: str, name: str) -> None:
    """A new option is to be read by kernels, or told here that it is not: until then no engine uses them."""
    if (reader, name) in (("native", "Kron"), ("triton", "LARS"), ("triton", "LAMB")):  # made from their own formulas
        assert RULES[name] not in READERS[reader]
        return
    assert sorted(READERS[reader][RULES[name]].split()) == sorted(f.name for f in fields(RULES[name]))


@pytest.mark.parametrize("kind", native.READS, ids=lambda kind: kind.__name__)
def test_native_code_is_told_what_it_is_said_to_read(kind: type[Rule]) -> None:
    read: set[str] = set()

    class Watched(kind):  # type: ignore[misc, valid-type]
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    for rule in (Watched(), Watched(relative_step=True, beta2_cap=0.9) if kind is RULES["Adafactor"] else Watched()):
        given = Options(rule, Handling(), 1, 0.1, 1.0, None)
        native.TRANSLATED[kind](*given)
        layout_of(given)
        rows_of(Operand("w", (130, 140), 8, 8, (8, 8, 8), ("float32",) * 5, 0), given)
    assert read >= set(native.READS[kind].split())


@pytest.mark.parametrize("kind", triton.READS, ids=lambda kind: kind.__name__)
def test_kernels_for_gpus_name_what_they_are_said_to_read(kind: type[Rule]) -> None:
    folder = Path(inspect.getfile(triton)).parent
    files = [*folder.glob(f"{kind.__name__.lower()}*.py"), folder / "passes.py", folder / "tables.py"]
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


@pytest.fixture
def _toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule of the name LAMB with an option more, after front ends have made their classes of the one without."""
    if importlib.util.find_spec("torch"):
        importlib.import_module("thalweg.torch")
    monkeypatch.setitem(RULES, "LAMB", LAMB)  # type: ignore[arg-type]


@needs_core
@pytest.mark.usefixtures("_toy")
@pytest.mark.parametrize("toy", [0.0, 0.5])
class TestAnOptionThatKernelsDoNotRead:
    def test_numpy(self, toy: float) -> None:
        w, g = np.ones((3, 4)), np.full((3, 4), 0.5)
        optimizer = thalweg.numpy.LAMB(0.1, toy=toy)
        optimizer.step({"w": w}, {"w": g})
        assert optimizer.engine == "reference"
        assert np.allclose(w, 0.9 + toy)
        with pytest.raises(OptionError, match="'w': there is no fused kernel of LAMB with the option toy"):
            thalweg.numpy.LAMB(0.1, toy=toy, engine="fused").step({"w": w}, {"w": g})

    def test_torch(self, toy: float) -> None:
        torch = pytest.importorskip("torch")
        import thalweg.torch

        def stepped(**given: Any) -> Any:
            w = torch.nn.Parameter(torch.ones(3, 4))
            w.grad = torch.full((3, 4), 0.5)
            optimizer = thalweg.torch.LAMB([w], lr=0.1, toy=toy, **given)
            optimizer.step()
            return w, optimizer

        w, optimizer = stepped()
        assert "fused" not in optimizer.engine
        assert torch.allclose(w, torch.full((3, 4), 0.9 + toy))
        with pytest.raises(OptionError, match="there is no fused kernel of LAMB with the option toy"):
            stepped(engine="fused")

    def test_kernels_for_gpus(self, toy: float) -> None:
        torch = pytest.importorskip("torch")
        from thalweg.settings import Setting
        from thalweg.torch import gpu

        reason = gpu.reason_against(Setting(Adafactor(toy=toy), Handling()), torch.ones(3, 4), {})
        assert reason == "there is no fused kernel of Adafactor with the option toy"
        # kernels that are made from a rule know every option of it
        assert gpu.reason_against(Setting(LAMB(toy=toy), Handling()), torch.ones(3, 4), {}) == ""
