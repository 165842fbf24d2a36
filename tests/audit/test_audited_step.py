"""One step of a trainer's run, audited by its number: as callbacks of trainers call it."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from thalweg.audit import AuditError  # noqa: E402
from thalweg.integrations.audited import ChosenStep  # noqa: E402


def run(chosen: ChosenStep, optimizer: Any, p: Any, *, by_closures: bool = False) -> None:
    """Three steps, the second of which moves twice as far."""

    def closure() -> Any:
        p.grad = torch.ones(4)
        return torch.tensor(0.0)

    for t in (1, 2, 3):
        closure()
        chosen.begin(optimizer, None, t)
        optimizer.step(closure if by_closures else None)
        chosen.end()


@pytest.mark.parametrize("by_closures", [False, True])
def test_the_report_of_the_chosen_step_is_logged(caplog: Any, *, by_closures: bool) -> None:
    p = torch.nn.Parameter(torch.ones(4))
    with caplog.at_level(logging.INFO, "thalweg"):
        run(ChosenStep(2), torch.optim.SGD([p], lr=0.1), p, by_closures=by_closures)
    (record,) = caplog.records
    assert "step 2: audit of SGD: 1 of 1 tensors" in record.message
    assert "as the page" in record.message


def test_what_is_not_as_the_page_is_raised_if_asked_for() -> None:
    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step()
            super().step()

    p = torch.nn.Parameter(torch.ones(4))
    with pytest.raises(AuditError, match="moved 2 times as far"):
        run(ChosenStep(1, check=True), Twice([p], lr=0.1), p)


def test_an_audit_that_sees_no_step_ends_no_run(caplog: Any) -> None:
    p = torch.nn.Parameter(torch.ones(4))
    chosen = ChosenStep(1)
    chosen.begin(torch.optim.SGD([p], lr=0.1), None, 1)
    chosen.end()
    assert "step 1 was not audited: no steps were taken within" in caplog.text


def test_the_callback_for_a_trainer(caplog: Any) -> None:
    pytest.importorskip("transformers")
    from thalweg.integrations.transformers import Audit

    p = torch.nn.Parameter(torch.ones(4))
    optimizer, callback = torch.optim.SGD([p], lr=0.1), Audit(2)
    with caplog.at_level(logging.INFO, "thalweg"):
        for t in (0, 1):
            p.grad = torch.ones(4)
            state = SimpleNamespace(global_step=t)
            callback.on_pre_optimizer_step(None, state, None, optimizer=optimizer, model=None)
            optimizer.step()
            callback.on_optimizer_step(None, state, None)
    assert [record.message[:20] for record in caplog.records] == ["step 2: audit of SGD"]
