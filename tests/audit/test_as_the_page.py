"""An audit is silent where a step is that of its page: of our rules on all engines, and of other libraries."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import thalweg.torch  # noqa: E402
from thalweg.audit.report import AS_PAGE  # noqa: E402


def make_model(dtype: Any = None) -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)).to(dtype)


def audited(optimizer: Any, model: Any, steps: int = 1, **options: Any) -> Any:
    """The audit of the last of some steps."""
    for t in range(steps):
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(t)).to(next(model.parameters()).dtype)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if t + 1 < steps:
            optimizer.step()
    with thalweg.torch.audit(optimizer, model, **options) as audit:
        optimizer.step()
    return audit


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("library", [thalweg.torch, torch.optim])
def test_adamw(library: Any, steps: int) -> None:
    model = make_model()
    audit = audited(library.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1), model, steps)
    audit.check()
    assert [line.verdict for line in audit.report.lines] == [AS_PAGE] * 4
    assert [line.names[0] for line in audit.report.lines] == ["0.weight", "0.bias", "2.weight", "2.bias"]
