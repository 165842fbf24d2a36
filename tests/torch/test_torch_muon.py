"""Muon in torch: which parameters it takes, what it tells, and runs of torch's own that it continues."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import thalweg.torch  # noqa: E402
from thalweg.errors import ParameterError  # noqa: E402
from thalweg.torch import Muon  # noqa: E402


def test_what_is_no_matrix_is_refused_when_it_is_given() -> None:
    matrix, vector = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ParameterError, match=r"parameter 'b' has shape .*: it is no matrix.*such as AdamW"):
        Muon([("w", matrix), ("b", vector)])
    optimizer = Muon([("w", matrix)])
    with pytest.raises(ParameterError, match=r"parameter 'b' has shape"):
        optimizer.add_param_group({"params": [("b", torch.nn.Parameter(torch.ones(())))]})
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


def test_statistics_are_norms_of_what_is_orthogonalized() -> None:
    p = torch.nn.Parameter(torch.zeros(4, 2))
    optimizer = Muon([("w", p)], split=2, ns_dtype=None, momentum=0.0)
    p.grad = torch.tensor([[3.0, 0.0], [0.0, 4.0], [0.0, 0.0], [6.0, 8.0]])
    optimizer.step()
    assert optimizer.stats()["w"]["norm"].reshape(-1).tolist() == [5.0, 10.0]


@pytest.mark.parametrize("scaling", ["original", "spectral_unclamped"])
def test_runs_of_torch_go_on_with_their_scaling(scaling: str) -> None:
    """Scalings that this version of torch may not know yet."""
    p = torch.nn.Parameter(torch.randn(4, 8, generator=torch.Generator().manual_seed(0)))
    theirs = torch.optim.Muon([p], lr=0.02)
    p.grad = torch.ones_like(p)
    theirs.step()
    state = theirs.state_dict()
    state["param_groups"][0]["adjust_lr_fn"] = scaling
    other = Muon([p], lr=0.02, variant="torch", scaling="match_rms_adamw")
    with pytest.warns(thalweg.ResumeWarning, match=f"scaling='{scaling}' .here it was 'match_rms_adamw'"):
        thalweg.torch.import_peer(other, state, "torch.Muon")
    assert other.param_groups[0]["scaling"] == scaling
    assert torch.equal(other.state[p]["momentum_buffer"], theirs.state[p]["momentum_buffer"])
