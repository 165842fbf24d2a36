"""One step of a trainer's run, audited by its number: as callbacks of trainers call it."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from thalweg.audit import AuditError
from thalweg.integrations.audited import ChosenStep


def run(optimizer: Any, begin: Any, end: Any, *, by_closures: bool = False) -> None:
    """Three steps within a trainer's calls. begin: is given the number of a step."""
    (p,) = optimizer.param_groups[0]["params"]

    def closure() -> Any:
        p.grad = torch.ones(4)
        return torch.tensor(0.0)

    for t in (1, 2, 3):
        closure()
        begin(t)
        optimizer.step(closure if by_closures else None)
        end()


def make_optimizer(kind: Any = torch.optim.SGD) -> Any:
    return kind([torch.nn.Parameter(torch.ones(4))], lr=0.1)


@pytest.mark.parametrize("by_closures", [False, True])
def test_the_report_of_the_chosen_step_is_logged(caplog: Any, *, by_closures: bool) -> None:
    optimizer, chosen = make_optimizer(), ChosenStep(2)
    with caplog.at_level(logging.INFO, "thalweg"):
        run(optimizer, lambda t: chosen.begin(optimizer, None, t), chosen.end, by_closures=by_closures)
    (record,) = caplog.records
    assert "step 2: audit of SGD: 1 of 1 tensors" in record.message
    assert "as the page" in record.message


def test_what_is_not_as_the_page_is_raised_if_asked_for() -> None:
    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step()
            super().step()

    optimizer, chosen = make_optimizer(Twice), ChosenStep(1, check=True)
    with pytest.raises(AuditError, match="moved 2 times as far"):
        run(optimizer, lambda t: chosen.begin(optimizer, None, t), chosen.end)


def test_an_audit_that_sees_no_step_ends_no_run(caplog: Any) -> None:
    chosen = ChosenStep(1)
    chosen.begin(make_optimizer(), None, 1)
    chosen.end()
    assert "step 1 was not audited: no steps were taken within" in caplog.text


def test_the_callback_for_a_trainer(caplog: Any) -> None:
    pytest.importorskip("transformers")
    from thalweg.integrations.transformers import Audit

    optimizer, callback = make_optimizer(), Audit(2)

    def begin(t: int) -> None:
        callback.on_pre_optimizer_step(None, SimpleNamespace(global_step=t - 1), None, optimizer=optimizer)

    with caplog.at_level(logging.INFO, "thalweg"):
        run(optimizer, begin, lambda: callback.on_optimizer_step(None, None, None))
    assert [record.message[:20] for record in caplog.records] == ["step 2: audit of SGD"]
