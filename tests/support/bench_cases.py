"""Small models and made-up contestants for the tests of the bench."""

from __future__ import annotations

from thalweg.bench.bandwidth import Yardstick
from thalweg.bench.contestants import Contestant, Ready, Stepping
from thalweg.bench.rounds import Method
from thalweg.plan.models import Model, Tensor

TINY = Model("tiny", "Made up", (Tensor("first", (6, 5)), Tensor("second", (4,)), Tensor("third", (2, 3, 2, 2))))
#: Bytes a second, said without looking.
RATE = 1e9


def made_up(
    name: str, log: list[str], *, rule: str = "sgd", package: str = "other", copies: int = 2, moves: bool = True
) -> Contestant:
    """A contestant whose steps do nothing but move a number and write themselves into a log."""

    def make(workload: object, stepping: Stepping) -> Ready:
        weights = [0.0]

        def step() -> None:
            log.append(name)
            weights[0] += 0.001 * moves

        return Ready(step, probe=lambda: list(weights), engine=lambda: "made up")

    return Contestant(name, rule, package, "numpy", make, copies)


def failing(name: str, error: Exception, *, rule: str = "sgd") -> Contestant:
    def make(workload: object, stepping: Stepping) -> Ready:
        raise error

    return Contestant(name, rule, "other", "numpy", make, 2)


def yardstick(log: list[str] | None = None) -> Yardstick:
    def update() -> float:
        if log is not None:
            log.append("bandwidth")
        return RATE

    return Yardstick("made up", update)


def method(**options: object) -> Method:
    """One quick measurement, without waiting for anyone."""
    quick: dict[str, object] = dict(stepping=Stepping(), repeats=2, budget=1e12, memory=False, wait=0.0)
    return Method(**{**quick, **options})  # type: ignore[arg-type]
