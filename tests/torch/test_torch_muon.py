"""Muon in torch: which parameters it takes, stacks of equal shape, and a rule of one's own that needs whole tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from own_rules import Centred  # noqa: E402

import thalweg.torch  # noqa: E402
from thalweg import rules  # noqa: E402
from thalweg.errors import ParameterError  # noqa: E402
from thalweg.torch import Muon, wholes  # noqa: E402

SHAPES = [(6, 4), (6, 4), (4, 6), (6, 4), (3, 2, 2)]


def parameters(dtype: Any = torch.float32, shapes: Any = SHAPES) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)) for s in shapes]


def stepped(optimizer: Any, params: list[Any], steps: int = 3) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
        optimizer.step()
    return [p.detach().double().numpy() for p in params]


@pytest.mark.parametrize("shape", [(), (3,)])
def test_what_is_no_matrix_is_refused_when_it_is_given(shape: tuple[int, ...]) -> None:
    matrix, vector = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(shape))
    with pytest.raises(ParameterError, match=r"parameter 'b' has shape .*: it is no matrix.*such as AdamW"):
        Muon([("w", matrix), ("b", vector)])
    optimizer = Muon([("w", matrix)])
    with pytest.raises(ParameterError, match=r"parameter 'b' has shape"):
        optimizer.add_param_group({"params": [("b", vector)]})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ParameterError, match=r"parameter 'w' has shape .* 2 rows, which split=3 does not divide"):
        Muon([("w", matrix)], split=3)
    assert len(Muon([("w", matrix), ("b", vector)], overrides=[("b", dict(vectors="row"))]).param_groups) == 1


def test_a_frozen_vector_is_no_matter_until_it_is_stepped() -> None:
    vector = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    optimizer = Muon([("b", vector)])
    vector.requires_grad_()
    vector.grad = torch.ones(3)
    with pytest.raises(ParameterError, match=r"parameter 'b' has shape"):
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stacks_have_the_bits_of_single_tensors(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    whole = wholes.transform_lists

    def watched(rule: Any, lists: Any) -> Any:
        asked.append(len(lists[0]))
        return whole(rule, lists)

    monkeypatch.setattr(wholes, "transform_lists", watched)
    found = []
    for engine in ("foreach", "reference"):
        params = parameters(dtype)
        found.append(stepped(Muon(params, engine=engine, weight_decay=0.1), params))
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
    assert sorted(asked) == [1] * 6 + [3] * 3


def test_stacks_are_bounded() -> None:
    shown = [[p.detach() for p in parameters(shapes=[(6, 4)] * 5)]]
    found, wanted = (wholes.transform_lists(rules.Muon(), shown, most) for most in (48, None))
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one.tensor, other.tensor)


def test_statistics_are_norms_of_what_is_orthogonalized() -> None:
    p = torch.nn.Parameter(torch.zeros(4, 2))
    optimizer = Muon([("w", p)], split=2, ns_dtype=None, momentum=0.0)
    p.grad = torch.tensor([[3.0, 0.0], [0.0, 4.0], [0.0, 0.0], [6.0, 8.0]])
    optimizer.step()
    assert optimizer.stats()["w"]["norm"].reshape(-1).tolist() == [5.0, 10.0]


# ---- a rule of one's own


def test_a_rule_that_needs_whole_tensors() -> None:
    centred = thalweg.torch.optimizer(Centred)
    for engine in ("auto", "foreach", "reference"):
        params = parameters(torch.float64)
        start = [p.detach().clone() for p in params]
        stepped(centred(params, lr=0.1, engine=engine), params, 1)
        for p, first in zip(params, start, strict=True):
            wanted = first - 0.1 * (p.grad - p.grad.mean(0, keepdim=True))
            torch.testing.assert_close(p.detach(), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scaling", ["original", "spectral_unclamped"])
def test_runs_of_torch_go_on_with_their_scaling(scaling: str) -> None:
    """Scalings that this version of torch may not know yet."""
    p = torch.nn.Parameter(torch.randn(4, 8, generator=torch.Generator().manual_seed(0)))
    theirs = torch.optim.Muon([p], lr=0.02)
    p.grad = torch.ones_like(p)
    theirs.step()
    state = theirs.state_dict()
    state["param_groups"][0]["adjust_lr_fn"] = scaling
    ours = thalweg.torch.Muon([p], lr=0.02, variant="torch", scaling=scaling)
    thalweg.torch.import_peer(ours, state, "torch.Muon")
    assert torch.equal(ours.state[p]["momentum_buffer"], theirs.state[p]["momentum_buffer"])
    other = thalweg.torch.Muon([p], lr=0.02, variant="torch", scaling="match_rms_adamw")
    with pytest.warns(thalweg.ResumeWarning, match=f"scaling='{scaling}' .here it was 'match_rms_adamw'"):
        thalweg.torch.import_peer(other, state, "torch.Muon")
    assert other.param_groups[0]["scaling"] == scaling
