"""State in the host's memory: what a step takes, alone and behind a backward pass, beside a step with state on the GPU.

    python benchmarks/offload.py --models gpt2,llama-1b

The optimizer with ``offload_state=True`` and the one without take turns. Columns:

    first     s of the first step, which makes the state, and on the host pins it; kernels are compiled before
    alone     ms a step: some in a row and the wait for the last, divided by their number
    floor     ms that the bytes of the state take over the bus, the slower way, as measured here on pinned memory
    behind    ms that a step adds to matrix products of about --busy ms before it, which stand for forward and backward
    in step() ms until step() returns, while the GPU is busy
    peak      MB of the GPU's memory beyond weights and gradients, at most, from the first step on
    host      MB of pinned memory
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import thalweg.torch
from thalweg.bench.workload import Workload
from thalweg.plan.sources import resolve
from thalweg.show.devices import Device
from thalweg.torch.offload.lanes import Lanes

RULES = "LAMB,AdamW"
WAYS: Mapping[str, Mapping[str, Any]] = {
    "float32": {},
    "bfloat16": dict(state_dtype="bfloat16"),
    "int8": dict(state_dtype="int8"),
}
OPTIONS: Mapping[str, Mapping[str, Any]] = {"Muon": dict(vectors="row")}
#: Steps that are timed together: at most so many, for about so many seconds, and not fewer than these.
IN_A_ROW, ABOUT, FEWEST = 10, 0.5, 3


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def seconds(work: Callable[[], Any], times: int = 1) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / times


def bus(size: int = 2**28) -> tuple[float, float, float]:
    """Bytes a second to the GPU, from it, and each way while both are under way."""
    lanes = Lanes(torch.device("cuda", torch.cuda.current_device()))
    host, other = (torch.frombuffer(lanes.on_host(size), dtype=torch.uint8) for _ in range(2))
    room, beside = (lanes.on_device(size) for _ in range(2))

    def both() -> None:
        lanes.inward.copy(room, host)
        lanes.outward.copy(other, beside)

    works = (lambda: lanes.inward.copy(room, host), lambda: lanes.outward.copy(other, beside), both)
    found = [size / min(seconds(work, 8) for _ in range(5)) for work in works]
    return found[0], found[1], found[2]


def products(milliseconds: float) -> Callable[[], None]:
    """Matrix products that take about so long."""
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(x)

    def some(count: int) -> None:
        for _ in range(count):
            torch.mm(x, x, out=out)

    some(20)
    each = min(seconds(lambda: some(50)) for _ in range(3)) / 50
    count = max(1, round(milliseconds / 1e3 / each))
    return lambda: some(count)


class Contestant:
    """An optimizer over parameters that all share, with its figures."""

    def __init__(self, make: Callable[..., Any], params: Sequence[Any], options: Mapping[str, Any]) -> None:
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.optimizer = make(params, lr=1e-4, **options)
        self.first = seconds(self.optimizer.step)
        each = seconds(self.optimizer.step, 2)
        self.times = min(IN_A_ROW, max(FEWEST, round(ABOUT / each)))
        self.peak = torch.cuda.max_memory_allocated() - before
        self.alone: list[float] = []
        self.behind: list[float] = []
        self.host: list[float] = []

    def turn(self, busy: Callable[[], None]) -> None:
        step = self.optimizer.step
        self.alone.append(seconds(step, self.times))

        def trained() -> None:
            busy()
            start = time.perf_counter()
            step()
            self.host.append(time.perf_counter() - start)

        self.behind.append(seconds(trained, self.times) - seconds(busy, self.times))


def show(model: str, dtype: str, rules: Sequence[str], ways: Sequence[str], repeats: int, busy: float) -> None:
    """Print the table of a model, each row as soon as it is measured."""
    workload = Workload(resolve(model, dtype), Device("cuda"), dtype)
    params = [torch.nn.Parameter(p) for p in workload.params("torch")]
    for p, g in zip(params, workload.grads("torch")[0], strict=True):
        p.grad = g
    to_gpu, from_gpu, each = bus()
    work = products(busy)
    weights = 2 * sum(p.nbytes for p in params)
    for line in (
        f"## {model}, {dtype} parameters",
        "",
        f"Bus: {to_gpu / 1e9:.1f} GB/s to the GPU, {from_gpu / 1e9:.1f} GB/s from it, {each / 1e9:.1f} GB/s "
        f"each way at once. Weights and gradients: {weights / 1e6:,.0f} MB. Products: {seconds(work, 5) * 1e3:.1f} ms.",
        "",
        "| state | where | first, s | alone, ms | floor, ms | behind, ms | in step(), ms | peak, MB | host, MB |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ):
        say(line)
    for rule in rules:
        for way in ways:
            given = {**OPTIONS.get(rule, {}), **WAYS[way]}
            make = getattr(thalweg.torch, rule)
            Contestant(make, params, given)  # compiles kernels
            ran = {
                where: Contestant(make, params, {**given, "offload_state": where == "host"})
                for where in ("GPU", "host")
            }
            for _ in range(repeats):
                for each_one in ran.values():
                    each_one.turn(work)
            for where, own in ran.items():
                moved = own.optimizer.explain().host_bytes
                floor = f"{moved / min(to_gpu, from_gpu, each) * 1e3:.1f}" if moved else ""
                figures = [f"{statistics.median(some) * 1e3:.2f}" for some in (own.alone, own.behind, own.host)]
                cells = [f"{own.first:.1f}", figures[0], floor, *figures[1:]]
                cells += [f"{own.peak / 1e6:,.0f}", f"{moved / 1e6:,.0f}"]
                say(f"| {rule}, {way} | {where} | {' | '.join(cells)} |")
            del ran, own, each_one


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="gpt2,llama-1b", help="default: %(default)s")
    parser.add_argument("--rules", default=RULES, help="default: %(default)s")
    parser.add_argument("--ways", default=",".join(WAYS), help="of keeping state (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="of parameters and gradients (default: %(default)s)")
    parser.add_argument("--busy", type=float, default=50.0, help="ms of products before a step (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="turns that count (default: %(default)s)")
    given = parser.parse_args(arguments)
    for model in given.models.split(","):
        show(model, given.dtype, given.rules.split(","), given.ways.split(","), given.repeats, given.busy)
        say("")


if __name__ == "__main__":
    main()
