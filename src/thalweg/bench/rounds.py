"""Rounds in which every contestant steps once, after the memory's speed was measured for it."""

from __future__ import annotations

import contextlib
import gc
import io
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from thalweg.bench import memory
from thalweg.bench.bandwidth import SIZE, Yardstick
from thalweg.bench.contestants import Contestant, Ready, Stepping
from thalweg.bench.devices import Device
from thalweg.bench.quiet import QUIET, WAIT, undisturbed
from thalweg.bench.record import Comparison, Entrant, Heat, Times
from thalweg.bench.rules import floor
from thalweg.show.units import human_bytes

if TYPE_CHECKING:
    from thalweg.bench.workload import Workload

WARM_UP = 2
#: Larger than any weight that a step as small as ours could lead to.
ASTRAY = 1e3


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What is being done now, and how far its comparison is."""

    model: str
    rule: str
    doing: str
    #: A part of 1.
    done: float


@dataclass(frozen=True, kw_only=True)
class Method:
    """How a comparison is to be measured."""

    stepping: Stepping
    repeats: int
    #: Bytes of memory to stay below.
    budget: float
    memory: bool
    #: Seconds to wait for other processes before each round.
    wait: float = WAIT
    on_progress: Callable[[Progress], object] = lambda progress: None


def compare(
    workload: Workload, rule: str, contestants: Sequence[Contestant], yardstick: Yardstick, method: Method
) -> Comparison:
    """All contestants of a rule, in as many heats as memory asks for, with the reference in each."""
    model = workload.model
    found = Comparison(
        model=model.name,
        about=model.about,
        parameters=model.parameters,
        tensors=len(model.tensors),
        rule=rule,
        itemsize=workload.itemsize,
        floor=floor(rule, workload.model),
        yardstick=yardstick.name,
    )
    everyone = waiting = [contestant for contestant in contestants if contestant.rule == rule]
    while waiting:
        finished = 1 - len(waiting) / len(everyone)
        heat, rest = next_heat([*(c for c in everyone if c.name == found.reference), *waiting], workload, method.budget)
        part = (len(waiting) - len(rest)) / len(everyone)
        waiting = rest

        def say(doing: str, share: float, finished: float = finished, part: float = part) -> None:
            done = finished + share * part
            method.on_progress(Progress(model=model.name, rule=rule, doing=doing, done=done))

        ready = dict(started(heat, workload, method.stepping, found.left_out, say))
        if found.reference and found.reference not in ready:
            found.left_out |= dict.fromkeys(ready, f"{found.reference} could not run beside it")
            ready.clear()
        if ready:
            run_heat(found, ready, heat, workload, yardstick, method, say)
        ready.clear()
        workload.device.give_back()
    if method.memory and workload.device.name == "cpu":
        measure_memory(found, workload, contestants, method)
    return found


def next_heat(
    waiting: Sequence[Contestant], workload: Workload, budget: float
) -> tuple[list[Contestant], list[Contestant]]:
    """As many as fit into a budget of bytes, but at least two; and the rest."""
    # gradients of three frameworks, two copies of the parameters for temporaries, the yardstick, and the libraries
    needed = 5.0 * workload.nbytes + 2.2 * SIZE
    for count, contestant in enumerate(waiting):
        needed += kept_bytes(contestant, workload)
        if count >= 2 and needed > budget:
            return list(waiting[:count]), list(waiting[count:])
    return list(waiting), []


def kept_bytes(contestant: Contestant, workload: Workload) -> int:
    """Of its parameters and its state, which is in float32."""
    return workload.nbytes + 4 * workload.model.parameters * (contestant.copies - 1)


def check_room(contestant: Contestant, workload: Workload) -> None:
    """Raise a MemoryError on a CPU, where the system would rather end this process than say that memory is short."""
    needed, free = kept_bytes(contestant, workload), workload.device.free_bytes()
    if workload.device.name == "cpu" and needed > free:
        raise MemoryError(f"it keeps {human_bytes(needed)}, and {human_bytes(free)} are free")


def started(
    heat: Sequence[Contestant],
    workload: Workload,
    stepping: Stepping,
    left_out: dict[str, str],
    say: Callable[[str, float], object],
) -> Iterator[tuple[str, Ready]]:
    """Who can run, warmed up: state is made, functions are compiled."""
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
            left_out[contestant.name] = reason(error)
        else:
            yield contestant.name, ready


def reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@contextlib.contextmanager
def silence(contestant: Contestant) -> Iterator[None]:
    """Peers that print or warn do it unheard; what ours has to say is heard."""
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
    yardstick: Yardstick,
    method: Method,
    say: Callable[[str, float], object],
) -> None:
    """Take turns, and enter everything into the comparison."""

    def one_round() -> Times:
        return run_round(ready, workload.device, yardstick, method.stepping.inner)

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
                one_round()
            measured = Heat(*undisturbed(one_round, method.repeats, wait=method.wait, on_round=on_round))
    finally:
        gc.enable()
    found.heats.append(measured)
    for contestant in (c for c in heat if c.name in ready):
        own = ready[contestant.name]
        if contestant.name in found.entrants:  # the reference, in an earlier heat
            continue
        if not all(abs(value) < ASTRAY for value in own.probe()):
            found.left_out[contestant.name] = "its parameters are no longer finite, and its time means nothing"
        else:
            found.entrants[contestant.name] = entrant(contestant, own, workload, method)


def entrant(contestant: Contestant, ready: Ready, workload: Workload, method: Method) -> Entrant:
    measured = memory.on_gpu(contestant, ready) if method.memory and workload.device.name != "cpu" else None
    return Entrant(
        package=contestant.package,
        front_end=contestant.front_end,
        rule=contestant.own_rule,
        engine=ready.engine(),
        floor=floor(contestant.own_rule, workload.model),
        memory=measured,
        compiled=ready.compiled,
    )


def run_round(ready: Mapping[str, Ready], device: Device, yardstick: Yardstick, inner: int) -> Times:
    """Everyone once, in the same order, each after a pass that left nothing of the one before in the caches."""
    other_passes = {name: measure() for name, measure in yardstick.others.items()}
    seconds, bandwidth = {}, []
    for name, contestant in ready.items():
        contestant.prepare()
        bandwidth.append(yardstick.update())
        time.sleep(device.rest)
        seconds[name] = device.timed(partial(measurement, contestant, device.calls)) / (inner * device.calls)
    return Times(seconds, bandwidth, other_passes)


def measurement(contestant: Ready, calls: int) -> None:
    for _ in range(calls):
        contestant.step()
    contestant.wait()


def measure_memory(found: Comparison, workload: Workload, contestants: Sequence[Contestant], method: Method) -> None:
    by_name = {c.name: c for c in contestants if c.rule == found.rule}
    for name, known in found.entrants.items():
        method.on_progress(Progress(model=found.model, rule=found.rule, doing=f"memory of {name}", done=1.0))
        measured = memory.in_own_process(workload, by_name[name], method.stepping)
        found.entrants[name] = replace(known, memory=measured)
