"""Rounds in which every contestant steps in its turn."""

from __future__ import annotations

import contextlib
import gc
import io
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from thalweg.bench import memory
from thalweg.bench.bandwidth import SIZE, Yardstick
from thalweg.bench.contestants import Contestant, Ready, Stepping
from thalweg.bench.ours import count_floor
from thalweg.bench.quiet import QUIET, WAIT, run_undisturbed
from thalweg.bench.record import Comparison, Heat, Row, Times
from thalweg.show.modules import describe_error
from thalweg.show.units import human_bytes

if TYPE_CHECKING:
    from thalweg.bench.workload import Workload

WARM_UP = 2
#: Larger than any weight that steps as small as ours lead to.
ASTRAY = 1e3
#: Seconds, beside twice the host's time, that a GPU's queue is held.
HOLD = 1e-3


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What is being done now, and how far its comparison is."""

    model: str
    doing: str
    #: A part of 1.
    done: float


@dataclass(frozen=True, kw_only=True)
class Method:
    """How a comparison is measured."""

    stepping: Stepping
    repeats: int
    #: Bytes of memory to stay below.
    budget: float
    memory: bool
    #: Seconds to wait for other processes before each round.
    wait: float = WAIT
    on_progress: Callable[[Progress], object] = lambda progress: None
    #: Bytes of parameters from which on memory limits a step: smaller models are measured without a yardstick.
    large: int = 64 * 2**20
    #: Bytes that the yardstick goes through.
    yardstick_bytes: int = SIZE
    #: Measurements of one turn, whose median counts, on GPUs and with a small model; and seconds to end it after.
    calls: int = 20
    turn: float = 0.2
    #: Seconds of rest before a turn on a CPU: threads of OpenMP were seen to spin for 3 to 7 ms before they slept.
    rest: float = 0.02


@dataclass
class Contest:
    """Contestants on one model, and what was found so far."""

    workload: Workload
    yardstick: Yardstick | None
    method: Method
    #: How much of the contest is done, and which part of it the heat of now is.
    finished: float = 0.0
    part: float = 1.0

    def __post_init__(self) -> None:
        model = self.workload.model
        self.found = Comparison(
            model=model.name,
            about=model.about,
            parameters=model.parameters,
            tensors=len(model.tensors),
            itemsize=self.workload.itemsize,
            yardstick="" if self.yardstick is None else self.yardstick.name,
        )

    def run(self, contestants: Sequence[Contestant]) -> None:
        """Measure in as many heats as memory asks for, with the first one that runs in each heat."""
        found, device, waiting = self.found, self.workload.device, list(contestants)
        while waiting:
            first = [c for c in contestants if c.name == found.reference]
            heat, rest = choose_heat([*first, *waiting], self.workload, self.method.budget)
            self.finished = 1 - len(waiting) / len(contestants)
            self.part = (len(waiting) - len(rest)) / len(contestants)
            waiting = rest
            ready = dict(self.warm_up(heat))
            if found.reference and found.reference not in ready:
                found.left_out |= dict.fromkeys(ready, f"{found.reference} could not run beside it")
                ready.clear()
            if ready:
                self.run_heat([contestant for contestant in heat if contestant.name in ready], ready)
            ready.clear()
            device.release_memory()
        if self.method.memory and device.cuda is None:
            by_name = {contestant.name: contestant for contestant in contestants}
            for row in found.rows:
                self.method.on_progress(Progress(model=found.model, doing=f"memory of {row.contestant}", done=1.0))
                row.memory = memory.measure_in_process(self.workload, by_name[row.contestant], self.method.stepping)

    def say(self, doing: str, share: float) -> None:
        done = self.finished + share * self.part
        self.method.on_progress(Progress(model=self.found.model, doing=doing, done=done))

    def warm_up(self, heat: Sequence[Contestant]) -> Iterator[tuple[str, Ready]]:
        """Let everyone make its state and compile its functions; those who cannot run are left out with the reason."""
        for number, contestant in enumerate(heat):
            self.say(f"warming up {contestant.name}", 0.5 * number / len(heat))
            try:
                check_room(contestant, self.workload)
                with silence(contestant):
                    ready = contestant.make(self.workload, self.method.stepping)
                    first = ready.probe()
                    for _ in range(WARM_UP):
                        ready.prepare()
                        ready.step()
                    if ready.probe() == first:
                        raise RuntimeError("its step leaves the parameters as they were")
            except Exception as error:  # whatever a peer may lack here: the others are still worth measuring
                self.found.left_out[contestant.name] = describe_error(error)
            else:
                yield contestant.name, ready

    def run_heat(self, heat: Sequence[Contestant], ready: Mapping[str, Ready]) -> None:
        """Run the rounds of a heat, and enter everything into the comparison."""
        method, found = self.method, self.found
        run_round = partial(self.take_turns, heat, ready)

        def on_round(quiet: int, others: float) -> None:
            disturbed = f", disturbed: other processes took {others:.0%} of the cores" if others > QUIET else ""
            self.say(f"{quiet} of {method.repeats} rounds{disturbed}", 0.5 + 0.5 * quiet / method.repeats)

        self.say(f"0 of {method.repeats} rounds", 0.5)
        gc.collect()
        gc.disable()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for _ in range(WARM_UP):
                    run_round()
                measured = Heat(*run_undisturbed(run_round, method.repeats, wait=method.wait, on_round=on_round))
        finally:
            gc.enable()
        for contestant in heat:
            own = ready[contestant.name]
            if contestant.name == found.reference:  # it was in an earlier heat
                continue
            if all(abs(value) < ASTRAY for value in own.probe()):
                found.rows.append(self.enter(contestant, own))
            else:
                found.left_out[contestant.name] = "its parameters are no longer finite, and its time means nothing"
        found.add(measured)

    def enter(self, contestant: Contestant, ready: Ready) -> Row:
        on_gpu = self.method.memory and self.workload.device.cuda is not None
        return Row(
            contestant=contestant.name,
            package=contestant.package,
            front_end=contestant.front_end,
            rule=contestant.rule,
            engine=ready.engine(),
            floor=count_floor(contestant.rule, contestant.options, self.workload.model),
            memory=memory.measure_on_gpu(contestant, ready) if on_gpu else None,
            compiled=ready.compiled,
            reference=self.found.reference or contestant.name,
        )

    def take_turns(self, heat: Sequence[Contestant], ready: Mapping[str, Ready]) -> Times:
        """Measure everyone in the same order, each after a pass that leaves nothing of the one before in the caches."""
        device, inner = self.workload.device, self.method.stepping.inner
        calls = 1 if device.cuda is None and self.yardstick is not None else self.method.calls
        seconds: dict[str, float] = {}
        host: dict[str, float] = {}
        bandwidth: list[float] = []
        for contestant in heat:
            name, own = contestant.name, ready[contestant.name]
            measure = partial(measure_turn, own, calls=calls, turn=self.method.turn)
            own.prepare()
            if self.yardstick is not None:
                bandwidth.append(self.yardstick.measure())
            if device.cuda is None:
                time.sleep(self.method.rest)
                seconds[name] = measure(partial(device.time, partial(finish, own))) / inner
                continue
            host[name] = measure(partial(device.time_host, own.step)) / inner
            if contestant.front_end == "torch":
                hold = 2 * inner * host[name] + HOLD
                own.prepare()
                seconds[name] = measure(partial(device.time_queue, own.step, hold)) / inner
            else:  # its queue is not torch's: a row of steps, until all are done
                seconds[name] = device.time(partial(finish, own, calls)) / (inner * calls)
        return Times(seconds, bandwidth, host)


def choose_heat(
    waiting: Sequence[Contestant], workload: Workload, budget: float
) -> tuple[list[Contestant], list[Contestant]]:
    """Take as many as fit into a budget of bytes, but at least two; and tell who is left."""
    # two sets of gradients of two frameworks and one of JAX, temporaries, the yardstick, and the libraries
    needed = 7.0 * workload.nbytes + 2.2 * SIZE
    for count, contestant in enumerate(waiting):
        needed += count_bytes(contestant, workload)
        if count >= 2 and needed > budget:
            return list(waiting[:count]), list(waiting[count:])
    return list(waiting), []


def count_bytes(contestant: Contestant, workload: Workload) -> int:
    """Bytes of its parameters and of its state, which is in float32."""
    return workload.nbytes + 4 * workload.model.parameters * (contestant.copies - 1)


def check_room(contestant: Contestant, workload: Workload) -> None:
    """Raise a MemoryError on a CPU, where the system would rather end this process than say that memory is short."""
    needed, free = count_bytes(contestant, workload), workload.device.count_free_bytes()
    if workload.device.cuda is None and needed > free:
        raise MemoryError(f"it keeps {human_bytes(needed)}, and {human_bytes(free)} are free")


@contextlib.contextmanager
def silence(contestant: Contestant) -> Iterator[None]:
    """Keep what peers print and warn of to ourselves; what ours have to say is heard."""
    if contestant.package == "thalweg":
        yield
        return
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def measure_turn(ready: Ready, take: Callable[[], float], *, calls: int, turn: float) -> float:
    """The median of some measurements, each with its own gradients; those of the first are there."""
    taken = [take()]
    while len(taken) < calls and sum(taken) < turn:
        ready.prepare()
        taken.append(take())
    return statistics.median(taken)


def finish(ready: Ready, steps: int = 1) -> None:
    """Step, and return when everything is done."""
    for _ in range(steps):
        ready.step()
    ready.wait()
