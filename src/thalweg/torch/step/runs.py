"""The runs of a step: its buckets, each laid out by the engine that steps it, taken together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from thalweg.torch.engines.protocol import Bucket, CheckState, Engine, EngineKind, Run, Statistics
from thalweg.torch.sharding.collectives import Computation, in_lockstep


class Runs:
    """Buckets as engines step them."""

    def __init__(
        self,
        engines: Mapping[EngineKind, Engine],
        buckets: Sequence[Bucket],
        check_state: CheckState,
    ) -> None:
        #: Each run, with the places of its buckets.
        self.runs: list[tuple[Run, list[int]]] = []
        for kind, engine in engines.items():
            own = [i for i, bucket in enumerate(buckets) if bucket.engine == kind]
            if own:
                run = engine.lay_out([buckets[i] for i in own], check_state)
                self.runs.append((run, own))
        #: Whether all gradients are measured when it is time to write, and what they then decide.
        self.measures_gradients = len(self.runs) == 1 and self.runs[0][0].measures_gradients
        self.decision: Any = None

    def take(
        self,
        buckets: Sequence[Bucket],
        on_nonfinite: str,
        *,
        looks: bool,
        commit: Callable[[Sequence[str]], None],
    ) -> list[Statistics]:
        """Take a step with the gradients of these buckets; return its statistics, run by run.

        looks: whether to look for steps that are not finite, where that is an error. commit: is called with their names
        before anything is written, and raises where that must not be.
        """
        computations: list[Computation] = []
        prepared, taken = [], False
        statistics: list[Statistics] = []
        try:
            for run, own in self.runs:
                prepared.append(run)
                run.prepare([buckets[i] for i in own])
            for run in prepared:
                computations += run.measure(on_nonfinite)
            if computations:
                in_lockstep(computations)
            nonfinite = [name for run in prepared for name in run.nonfinite()] if looks else []
            commit(nonfinite)
            taken = True
            for run in prepared:
                statistics.append(run.write())
        finally:
            for run in prepared:
                run.release(taken=taken)
        return statistics
