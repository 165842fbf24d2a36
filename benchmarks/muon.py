"""The time of one step of Muon on the matrices of GPT-2 and of Llama 1B, beside torch.optim.Muon and products alone.

    python benchmarks/muon.py --repeats 10

The products are those of five Newton-Schulz steps in bfloat16 by library calls (bmm, baddbmm), matrices of one shape as
one batch, from tensors that are there. Contestants take turns, and the median of each is told: on the device, in a row
of steps without a wait, and of the host alone, which starts a step when the device is idle.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch

import thalweg.torch
from thalweg.spaces import torch as library
from thalweg.torch.engines import triton_whole

#: How many matrices of which rows and columns a model has.
MODELS = {
    "GPT-2": {(2304, 768): 12, (768, 768): 12, (3072, 768): 12, (768, 3072): 12},
    "Llama 1B": {(2048, 2048): 32, (512, 2048): 32, (8192, 2048): 32, (2048, 8192): 16},
}
A, B, C = 3.4445, -4.7750, 2.0315
STEPS = 5

Step = Callable[[], Any]
Shapes = Sequence[tuple[int, int]]


def make_parameters(shapes: Shapes, device: str) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(0.02 * torch.randn(shape, device=device)) for shape in shapes]
    for p in parameters:
        p.grad = 0.001 * torch.randn_like(p)
    return parameters


def multiply_alone(shapes: Shapes, device: str) -> Step:
    """The matrix products of a step and nothing else."""
    stacks = [
        torch.randn(count, min(shape), max(shape), device=device, dtype=torch.bfloat16) / max(shape)
        for shape, count in Counter(tuple(sorted(shape)) for shape in shapes).items()
    ]

    def step() -> None:
        for x in stacks:
            for _ in range(STEPS):
                gram = torch.bmm(x, x.mT)
                gram = torch.baddbmm(gram, gram, gram, beta=B, alpha=C)
                x = torch.baddbmm(x, gram, x, beta=A)

    return step


def step_by_library(shapes: Shapes, device: str) -> Step:
    """Our plain iteration with the library's products in place of our kernels."""
    ours = thalweg.torch.Muon(make_parameters(shapes, device), lr=1e-3, weight_decay=0.1)

    def step() -> None:
        with mock.patch.object(triton_whole, "space_of_kernels", return_value=library):
            ours.step()

    return step


def list_contestants(shapes: Shapes, device: str) -> dict[str, Step]:
    def ours(method: Any) -> Step:
        parameters = make_parameters(shapes, device)
        return thalweg.torch.Muon(parameters, lr=1e-3, weight_decay=0.1, ns_method=method).step

    theirs = torch.optim.Muon(make_parameters(shapes, device), lr=1e-3, weight_decay=0.1)
    return {
        "the library's plain products alone": multiply_alone(shapes, device),
        "thalweg, ns_method='plain', the library's products": step_by_library(shapes, device),
        "thalweg, ns_method='plain'": ours("plain"),
        "thalweg, ns_method='auto'": ours("auto"),
        "torch.optim.Muon": theirs.step,
    }


def time_row(step: Step, device: str, calls: int) -> float:
    """Milliseconds of one of several calls, one after the other, until the device is done."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    begin = time.perf_counter()
    for _ in range(calls):
        step()
    wait()
    return 1e3 * (time.perf_counter() - begin) / calls


def time_device(step: Step, device: str, calls: int) -> float:
    """Milliseconds of one of several calls as the device sees it."""
    if device != "cuda":
        return time_row(step, device, calls)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    step()  # so that the device has work while the host goes ahead
    begin.record()
    for _ in range(calls):
        step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls


def time_host(step: Step, device: str) -> float:
    """Milliseconds until the host may go on."""
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    step()
    return 1e3 * (time.perf_counter() - begin)


def find_medians(steps: dict[str, Step], device: str, repeats: int, calls: int) -> dict[str, dict[str, float]]:
    for step in steps.values():
        time_row(step, device, 6)
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            times = time_device(step, device, calls), time_row(step, device, calls), time_host(step, device)
            found[name].append(times)
    columns = ("device", "row", "host")
    return {
        name: dict(zip(columns, map(statistics.median, zip(*times, strict=True)), strict=True))
        for name, times in found.items()
    }


def report(title: str, found: dict[str, dict[str, float]]) -> str:
    lines = [f"## {title}", "", "| ms a step | device | in a row | host |", "|---|---:|---:|---:|"]
    lines += [f"| {name} | {own['device']:.2f} | {own['row']:.2f} | {own['host']:.2f} |" for name, own in found.items()]
    return "\n".join([*lines, "", ""])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="*", default=list(MODELS), help="default: all")
    parser.add_argument("--scale", type=int, default=1, help="divide all sizes by this (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=10, help="turns of each that count (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=5, help="steps of a turn (default: %(default)s)")
    parser.add_argument("--json", help="file for the medians")
    given = parser.parse_args(arguments)
    record = {}
    for model in given.models:
        shapes = [
            (rows // given.scale, columns // given.scale)
            for (rows, columns), count in MODELS[model].items()
            for _ in range(count)
        ]
        contestants = list_contestants(shapes, given.device)
        record[model] = find_medians(contestants, given.device, given.repeats, given.calls)
        sys.stdout.write(report(model, record[model]))
        sys.stdout.flush()
        del contestants
    if given.json:
        with open(given.json, "w") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
