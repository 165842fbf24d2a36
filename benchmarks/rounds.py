"""Rounds in which every contestant steps once, and what comes out of them."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bandwidth import GIB, Bandwidth, timed
from contestants import CONTESTANTS, Contestant, Model, Ready
from memory import extra_memory, trim
from quiet import Round, undisturbed

WARM_UP = 2
#: Seconds of rest before each step. Threads of OpenMP were seen to spin for 3 to 7 ms before they slept.
REST = 0.02


@dataclass
class Times:
    """One round: seconds of everyone's step, and GB/s of the memory meanwhile."""

    seconds: dict[str, float]
    #: The yardstick, before every step.
    update: list[float]
    #: For information, once.
    scale: float
    copy: float
    read: float


@dataclass
class Heat:
    """Contestants that were in memory together. Only ``rounds`` count."""

    rounds: list[Round[Times]]
    left_out: list[Round[Times]]

    def seconds(self, name: str) -> list[float]:
        return [each.result.seconds[name] for each in self.rounds]

    def has(self, name: str) -> bool:
        return name in self.rounds[0].result.seconds


@dataclass
class Comparison:
    """All heats of one rule on one model."""

    model: Model
    rule: str
    heats: list[Heat] = field(default_factory=list)
    engines: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    memory: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def reference(self) -> str:
        """Whom others are compared with: the first that runs, which is in every heat."""
        return next(iter(self.engines), "")

    @property
    def rounds(self) -> list[Round[Times]]:
        return [each for heat in self.heats for each in heat.rounds]

    def rows(self) -> Iterator[dict[str, Any]]:
        for contestant in (c for c in CONTESTANTS if c.rule == self.rule and c.name in self.engines):
            name = contestant.name
            heats = [heat for heat in self.heats if heat.has(name)]
            seconds = [s for heat in heats for s in heat.seconds(name)]
            reference = [s for heat in heats for s in heat.seconds(self.reference)]
            updates = [b for heat in heats for each in heat.rounds for b in each.result.update]
            bandwidth = 1e9 * statistics.median(updates)
            median, floor = statistics.median(seconds), contestant.floor * self.model.elements
            yield {
                "contestant": name,
                "engine": self.engines[name],
                "median_ms": 1e3 * median,
                "min_ms": 1e3 * min(seconds),
                "ratio": statistics.median(own / other for own, other in zip(seconds, reference, strict=True)),
                "floor_bytes": contestant.floor,
                "floor_gb_per_s": 1e-9 * floor / median,
                "bytes_a_parameter": median * bandwidth / self.model.elements,
                "share_of_floor": floor / bandwidth / median,
                "memory": self.memory.get(name),
            }


def compare(
    model: Model, rule: str, bandwidth: Bandwidth, *, engine: str, repeats: int, budget: float, memory: bool
) -> Comparison:
    found = Comparison(model, rule)
    waiting = [contestant for contestant in CONTESTANTS if contestant.rule == rule]
    while waiting:
        heat, waiting = next_heat(waiting, model, budget)
        ready = dict(started(heat, model, engine, found.skipped))
        if ready:
            found.heats.append(run_heat(ready, repeats, bandwidth))
            found.engines |= {name: contestant.engine() for name, contestant in ready.items()}
        ready.clear()
        trim()
        if waiting:  # the reference runs again, beside the next
            waiting = [*(c for c in heat if c.name == found.reference), *waiting]
    if memory:
        found.memory = {name: extra_memory(model.name, rule, name, engine) for name in found.engines}
    return found


def next_heat(waiting: Sequence[Contestant], model: Model, budget: float) -> tuple[list[Contestant], list[Contestant]]:
    """As many as fit into a budget of GiB, but at least two; and the rest."""
    # gradients, two copies of the parameters for temporaries, the array of Bandwidth, and the libraries
    needed = 3 * 4 * model.elements + 2.2 * GIB
    for count, contestant in enumerate(waiting):
        needed += 4 * model.elements * contestant.copies
        if count >= 2 and needed > budget * GIB:
            return list(waiting[:count]), list(waiting[count:])
    return list(waiting), []


def started(
    heat: Sequence[Contestant], model: Model, engine: str, skipped: dict[str, str]
) -> Iterator[tuple[str, Ready]]:
    """Who can run, warmed up: state is made, functions are compiled."""
    for contestant in heat:
        try:
            ready = contestant.make(model, engine)
            first = ready.probe()
            for _ in range(WARM_UP):
                ready.prepare()
                ready.step()
            if ready.probe() == first:
                raise RuntimeError("its step leaves the parameters as they were")
        except Exception as error:  # whatever a peer may lack here: the others are still worth measuring
            skipped[contestant.name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        else:
            yield contestant.name, ready


def run_heat(ready: Mapping[str, Ready], repeats: int, bandwidth: Bandwidth) -> Heat:
    gc.collect()
    gc.disable()
    for _ in range(WARM_UP):
        run_round(ready, bandwidth)
    heat = Heat(*undisturbed(lambda: run_round(ready, bandwidth), repeats))
    gc.enable()
    for name, contestant in ready.items():
        if not all(abs(value) < 1e3 for value in contestant.probe()):
            raise RuntimeError(f"{name}: its parameters are no longer finite, and its time means nothing")
    return heat


def run_round(ready: Mapping[str, Ready], bandwidth: Bandwidth) -> Times:
    times = Times({}, [], bandwidth.scale(), bandwidth.copy(), bandwidth.read())
    for name, contestant in ready.items():
        contestant.prepare()
        times.update.append(bandwidth.update())
        time.sleep(REST)
        times.seconds[name] = timed(contestant.step)
    return times
