"""torch tensors stepped by native code: the bits of arrays of numpy, what is put in place, and who else steps.

That engines give the numbers of the reference, tests/engines have; that other layouts, mixed dtypes, empty tensors and
missing gradients give the same steps, `thalweg check` asks of every rule; that tensors are replaced between steps,
tests/torch/test_torch_remembered.py, and replaced state tests/torch/test_torch_edited.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from agree import draw, draw_gradients
from own_rules import Signed
from side_by_side import DTYPES, every_rule, made, needs_core
from side_by_side_torch import FULL, SHAPES, gradients, make, parameters, train

import thalweg.torch
from thalweg import OptionError
from thalweg.torch import LARS
from thalweg.torch.exchange import to_numpy

pytestmark = needs_core


@every_rule
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options", [{}, dict(rounding="stochastic", on_nonfinite="skip", state_dtype="bfloat16")], ids=str
)
def test_numpy_and_torch_give_the_same_bits(rule: str, dtype: str, options: dict[str, Any]) -> None:
    options = {**FULL[rule], "weight_decay": 0.1, **options}
    arrays, named = draw(SHAPES, dtype), parameters(dtype)
    plain, optimizer = made(rule, "fused", **options), make(rule, named, **options)
    for step in draw_gradients(SHAPES, dtype, 3):
        plain.step(arrays, step)
    train(optimizer, named, gradients(3, dtype))
    for name, p in named:
        assert to_numpy(p).tobytes() == arrays[name].tobytes() != draw(SHAPES, dtype)[name].tobytes(), name
        for key in plain.state[name].keys() - {"step"}:
            assert to_numpy(optimizer.state[p][key]).tobytes() == plain.state[name][key].tobytes(), (name, key)


def stepped(optimizer: Any, p: Any) -> None:
    p.grad = torch.ones_like(p)
    optimizer.step()


class Marked(torch.Tensor):
    """A subclass, whose memory may be anywhere."""


def test_a_gradient_of_another_class_is_left_to_other_engines() -> None:
    p = torch.nn.Parameter(torch.ones(8))
    p.grad = torch.ones(8).as_subclass(Marked)
    optimizer = LARS([p], lr=0.1)
    optimizer.step()
    assert optimizer.engine == "reference"
    with pytest.raises(OptionError, match="a gradient of type Marked"):
        LARS([p], lr=0.1, engine="fused").step()


@pytest.mark.parametrize("engine", ["reference", "foreach"])
def test_engines_of_lists_compile_nothing(engine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Unseen(Signed):
        def update(self, xp: Any, g: Any, s: Any, p: Any, **given: Any) -> Any:
            return super().update(xp, xp.maximum(g, -0.123), s, p, **given)

    monkeypatch.setenv("THALWEG_CACHE", str(tmp_path / "cache"))
    p = torch.nn.Parameter(torch.ones(3))
    stepped(thalweg.torch.optimizer(Unseen)([p], lr=0.1, engine=engine), p)
    assert p[0] != 1
    assert not (tmp_path / "cache").exists()
