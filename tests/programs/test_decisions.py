"""What is due in a step is decided by the counts that the host keeps, if it depends on nothing else."""

from __future__ import annotations

from typing import Any

from thalweg.programs.parts import decide_by, reason_unparted
from thalweg.rules import Kron


def test_numbers_of_options_are_read_at_every_step() -> None:
    counts = {"refresh": 0.75}
    assert decide_by(Kron(precond_update_probability=0.5), "momentum_buffer", counts, 3) == (True, {"refresh": 0.25})
    assert decide_by(Kron(precond_update_probability=0.125), "momentum_buffer", counts, 3) == (
        False,
        {"refresh": 0.875},
    )


class Sudden(Kron):
    """Factors are refreshed whenever gradients add up to more than 1."""

    def prepare(self, xp: Any, g: Any, s: Any, p: Any, t: Any) -> Any:
        return super().prepare(xp, g, s, p, t)._replace(due=xp.sums((g, None))[0] > 1.0)


def test_a_rule_that_decides_by_gradients_is_not_parted() -> None:
    assert reason_unparted(Kron(), (4, 3)) == ""
    assert "what is due in a step of Sudden depends on tensors" in reason_unparted(Sudden(), (4, 3))
