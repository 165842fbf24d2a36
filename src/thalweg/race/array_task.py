"""Tasks in plain numpy: parameters by name, and gradients from a function."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from thalweg.race.contestants import Contestant
from thalweg.race.optimizers import make_for_arrays
from thalweg.race.task import Array, Measure, Run, Task, Training, put_averages


def no_batches(seed: int, batch_size: Any) -> Iterator[Any]:
    return itertools.repeat(None)


@dataclass(frozen=True, kw_only=True)
class ArrayTask(Task):
    """A task in numpy.

    >>> task = ArrayTask(
    ...     name="parabola",
    ...     init=lambda seed: {"x": np.random.default_rng(seed).normal(size=8)},
    ...     gradients=lambda params, batch: {"x": 2 * params["x"]},
    ...     evaluate=lambda params: np.square(params["x"]).sum(),
    ... )
    """

    #: The first parameters by name, for a seed.
    init: Callable[[int], Mapping[str, Array]]
    #: The gradients by name, for parameters and a batch.
    gradients: Callable[[Any, Any], Mapping[str, Array]]
    #: The loss, or the loss and a score, of some parameters.
    evaluate: Callable[[Any], Any]
    #: Batches, endlessly, for a seed and a batch size; without them ``gradients`` gets None.
    batches: Callable[[int, Any], Iterator[Any]] = no_batches

    functions: ClassVar[tuple[str, ...]] = ("init", "gradients", "evaluate", "batches")

    def start(self, contestant: Contestant, run: Run) -> Training:
        if run.device != "cpu":
            raise self.error(f"it is plain numpy and runs only on the cpu, not on {run.device!r}")
        params = self.call("init", self.init, run.seed)
        if not isinstance(params, Mapping):
            raise self.error(f"init must return arrays by name, got {type(params).__name__}")
        for name, p in params.items():
            if not isinstance(p, np.ndarray):
                raise self.error(f"init must return arrays by name, and {name!r} is a {type(p).__name__}")
        params = {name: np.array(p) for name, p in params.items()}
        optimizer, step_arrays = make_for_arrays(contestant, params, self, run)
        averaged = [params] if contestant.rule else []  # those of torch know their parameters themselves
        batches = self.begin_batches(self.batches, run)

        def step(number: int) -> None:
            # a rate that is too large is part of any sweep: its overflows are recorded, not warned of
            with np.errstate(all="ignore"):
                gradients = self.call("gradients", self.gradients, params, next(batches))
                self.call("step()", step_arrays, number, gradients)

        def measure(number: int) -> Measure:
            with np.errstate(all="ignore"), put_averages(optimizer, *averaged):
                return self.read_measure(self.call("evaluate", self.evaluate, params))

        return Training(optimizer, step, measure, sum(p.size for p in params.values()))


def shuffle_batches(count: int, seed: int, batch_size: int) -> Iterator[Array]:
    """Batches of indices, endlessly: everyone in a new order, over and over, cut into equal parts.

    A batch may be larger than the set; then it holds some examples more than once.
    """
    rng = np.random.default_rng(seed)
    waiting = np.empty(0, np.int64)
    while True:
        while len(waiting) < batch_size:
            waiting = np.concatenate([waiting, rng.permutation(count)])
        yield waiting[:batch_size]
        waiting = waiting[batch_size:]
