"""Small models and made-up contestants for the tests of the bench."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from thalweg.bench.bandwidth import Yardstick
from thalweg.bench.contestants import Contestant, Ready, Stepping
from thalweg.bench.record import Comparison
from thalweg.bench.rounds import Contest, Method
from thalweg.plan.models import Model, Tensor

if TYPE_CHECKING:
    from thalweg.bench.workload import Workload

TINY = Model("tiny", "Made up", (Tensor("first", (6, 5)), Tensor("second", (4,)), Tensor("third", (2, 3, 2, 2))))
#: Bytes a second, said without looking.
RATE = 1e9


def made_up(
    name: str, log: list[str], *, rule: str = "SGD", package: str = "other", copies: int = 2, moves: bool = True
) -> Contestant:
    """A contestant whose steps do nothing but move a number and write themselves into a log."""

    def make(workload: object, stepping: Stepping) -> Ready:
        weights = [0.0]

        def step() -> None:
            log.append(name)
            weights[0] += 0.001 * moves

        return Ready(step, probe=lambda: list(weights), engine=lambda: "made up")

    return Contestant(name, rule, package, "numpy", make, copies)


def failing(name: str, error: Exception, *, rule: str = "SGD") -> Contestant:
    def make(workload: object, stepping: Stepping) -> Ready:
        raise error

    return Contestant(name, rule, "other", "numpy", make, 2)


def yardstick(log: list[str] | None = None) -> Yardstick:
    def measure() -> float:
        if log is not None:
            log.append("bandwidth")
        return RATE

    return Yardstick("made up", measure)


def method(**options: object) -> Method:
    """One quick measurement, without waiting for anyone."""
    quick: dict[str, object] = dict(stepping=Stepping(), repeats=2, budget=1e12, memory=False, wait=0.0, rest=0.0)
    return Method(**{**quick, **options})  # type: ignore[arg-type]


def compare(
    workload: Workload, contestants: Sequence[Contestant], yardstick: Yardstick | None, method: Method
) -> Comparison:
    """A comparison of these contestants."""
    contest = Contest(workload, yardstick, method)
    contest.run(contestants)
    return contest.found


class FakeCuda:
    """A GPU that takes notes."""

    #: Milliseconds between any two events.
    ELAPSED = 7.0

    def __init__(self) -> None:
        self.log: list[str] = []
        self.allocated, self.peak, self.slept = 1000, 1000, 0

    def is_available(self) -> bool:
        return True

    def get_device_name(self, device: str = "") -> str:
        return "Imaginary 9000"

    def synchronize(self, device: str = "") -> None:
        self.log.append("wait")

    def _sleep(self, cycles: int) -> None:
        self.slept = cycles
        self.log.append("sleep")

    def Event(self, *, enable_timing: bool) -> FakeEvent:
        assert enable_timing
        return FakeEvent(self)

    def mem_get_info(self, device: str = "") -> tuple[int, int]:
        return 70, 80

    def empty_cache(self) -> None:
        self.log.append("empty_cache")

    def reset_peak_memory_stats(self, device: str = "") -> None:
        self.peak = self.allocated

    def memory_allocated(self, device: str = "") -> int:
        return self.allocated

    def max_memory_allocated(self, device: str = "") -> int:
        return self.peak


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def record(self) -> None:
        self.cuda.log.append("event")

    def elapsed_time(self, other: FakeEvent) -> float:
        return self.cuda.ELAPSED
