"""Rounds in which every contestant steps in its turn."""

from __future__ import annotations

import contextlib
import gc
import io
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from thalweg.bench import memory
from thalweg.bench.bandwidth import SIZE, Yardstick
from thalweg.bench.contestants import Contestant, Ready, Stepping
from thalweg.bench.ours import count_floor
from thalweg.bench.quiet import QUIET, WAIT, run_undisturbed
from thalweg.bench.record import Comparison, Entrant, Heat, Times
from thalweg.show.devices import Device
from thalweg.show.units import human_bytes

if TYPE_CHECKING:
    from thalweg.bench.workload import Workload

WARM_UP = 2
#: Larger than any weight that steps as small as ours lead to.
ASTRAY = 1e3
#: Bytes of parameters from which on memory limits a step: smaller models are measured without a yardstick.
LARGE = 64 * 2**20
#: Measurements of one turn, whose median counts, on GPUs and with a small model; and seconds to end it after.
CALLS, TURN = 20, 0.2
#: Seconds of rest before a turn on a CPU: threads of OpenMP were seen to spin for 3 to 7 ms before they slept.
REST = 0.02
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


def compare(
    found: Comparison,
    workload: Workload,
    contestants: Sequence[Contestant],
    yardstick: Yardstick | None,
    method: Method,
) -> None:
    """Measure contestants, in as many heats as memory asks for, with the first one that runs in each heat."""
    waiting = list(contestants)
    while waiting:
        finished = 1 - len(waiting) / len(contestants)
        first = [c for c in contestants if c.name == found.reference]
        heat, rest = choose_heat([*first, *waiting], workload, method.budget)
        part = (len(waiting) - len(rest)) / len(contestants)
        waiting = rest

        def say(doing: str, share: float, finished: float = finished, part: float = part) -> None:
            method.on_progress(Progress(model=found.model, doing=doing, done=finished + share * part))

        ready = dict(warm_up(heat, workload, method.stepping, found.left_out, say))
        if found.reference and found.reference not in ready:
            found.left_out |= dict.fromkeys(ready, f"{found.reference} could not run beside it")
            ready.clear()
        if ready:
            run_heat(found, ready, heat, workload, yardstick, method, say)
        ready.clear()
        workload.device.release_memory()
    if method.memory and workload.device.cuda is None:
        for contestant in (c for c in contestants if c.name in found.entrants):
            method.on_progress(Progress(model=found.model, doing=f"memory of {contestant.name}", done=1.0))
            measured = memory.measure_in_process(workload, contestant, method.stepping)
            found.entrants[contestant.name] = replace(found.entrants[contestant.name], memory=measured)


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


def warm_up(
    heat: Sequence[Contestant],
    workload: Workload,
    stepping: Stepping,
    left_out: dict[str, str],
    say: Callable[[str, float], object],
) -> Iterator[tuple[str, Ready]]:
    """Let everyone make its state and compile its functions; those who cannot run are left out with the reason."""
    for number, contestant in enumerate(heat):
        say(f"warming up {contestant.name}", 0.5 * number / len(heat))
        try:
            check_room(contestant, workload)
            with silence(contestant):
                ready = contestant.make(workload, stepping)
                first = ready.probe()
                for _ in range(WARM_UP):
                    ready.prepare()
                    ready.step()
                if ready.probe() == first:
                    raise RuntimeError("its step leaves the parameters as they were")
        except Exception as error:  # whatever a peer may lack here: the others are still worth measuring
            lines = str(error).strip().splitlines()
            left_out[contestant.name] = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        else:
            yield contestant.name, ready


@contextlib.contextmanager
def silence(contestant: Contestant) -> Iterator[None]:
    """Keep what peers print and warn of to ourselves; what ours have to say is heard."""
    if contestant.package == "thalweg":
        yield
        return
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def run_heat(
    found: Comparison,
    ready: Mapping[str, Ready],
    heat: Sequence[Contestant],
    workload: Workload,
    yardstick: Yardstick | None,
    method: Method,
    say: Callable[[str, float], object],
) -> None:
    """Run the rounds of a heat, and enter everything into the comparison."""
    taking_part = [contestant for contestant in heat if contestant.name in ready]
    calls = 1 if workload.device.cuda is None and yardstick is not None else CALLS

    def run_round() -> Times:
        return take_turns(taking_part, ready, workload.device, yardstick, method.stepping.inner, calls)

    def on_round(quiet: int, others: float) -> None:
        disturbed = f", disturbed: other processes took {others:.0%} of the cores" if others > QUIET else ""
        say(f"{quiet} of {method.repeats} rounds{disturbed}", 0.5 + 0.5 * quiet / method.repeats)

    say(f"0 of {method.repeats} rounds", 0.5)
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
    found.heats.append(measured)
    for contestant in taking_part:
        own = ready[contestant.name]
        if contestant.name in found.entrants:  # the reference, in an earlier heat
            continue
        if not all(abs(value) < ASTRAY for value in own.probe()):
            found.left_out[contestant.name] = "its parameters are no longer finite, and its time means nothing"
            continue
        on_gpu = method.memory and workload.device.cuda is not None
        found.entrants[contestant.name] = Entrant(
            package=contestant.package,
            front_end=contestant.front_end,
            rule=contestant.rule,
            engine=own.engine(),
            floor=count_floor(contestant.rule, contestant.options, workload.model),
            memory=memory.measure_on_gpu(contestant, own) if on_gpu else None,
            compiled=own.compiled,
        )


def take_turns(
    heat: Sequence[Contestant],
    ready: Mapping[str, Ready],
    device: Device,
    yardstick: Yardstick | None,
    inner: int,
    calls: int,
) -> Times:
    """Measure everyone, in the same order, each after a pass that leaves nothing of the one before in the caches."""
    seconds: dict[str, float] = {}
    host: dict[str, float] = {}
    bandwidth: list[float] = []
    for contestant in heat:
        name, own = contestant.name, ready[contestant.name]
        own.prepare()
        if yardstick is not None:
            bandwidth.append(yardstick.measure())
        if device.cuda is None:
            time.sleep(REST)
            seconds[name] = measure(own, partial(device.time, partial(finish, own)), calls) / inner
            continue
        host[name] = measure(own, partial(device.time_host, own.step), calls) / inner
        if contestant.front_end == "torch":
            hold = 2 * inner * host[name] + HOLD
            own.prepare()
            seconds[name] = measure(own, partial(device.time_queue, own.step, hold), calls) / inner
        else:  # its queue is not torch's: a row of steps, until all are done
            seconds[name] = device.time(partial(finish, own, calls)) / (inner * calls)
    return Times(seconds, bandwidth, host)


def measure(ready: Ready, take: Callable[[], float], calls: int) -> float:
    """The median of some measurements, each with its own gradients; those of the first are there."""
    taken = [take()]
    while len(taken) < calls and sum(taken) < TURN:
        ready.prepare()
        taken.append(take())
    return statistics.median(taken)


def finish(ready: Ready, steps: int = 1) -> None:
    """Step, and return when everything is done."""
    for _ in range(steps):
        ready.step()
    ready.wait()
