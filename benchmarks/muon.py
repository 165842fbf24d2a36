"""The time of one step of Muon on the matrices of GPT-2, beside torch.optim.Muon and its matrix products alone.

    python benchmarks/muon.py --repeats 50

The products are those of five Newton-Schulz steps in bfloat16 by library calls (bmm, baddbmm), matrices of one shape as
one batch, from tensors that are there: what no Muon that takes these products can be faster than. Contestants take
turns, and the median of each is told, eager and as a CUDA graph where it can be captured.
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

import torch

import thalweg.torch

#: Rows and columns of the matrices of a block of GPT-2.
BLOCK = ((2304, 768), (768, 768), (3072, 768), (768, 3072))
A, B, C = 3.4445, -4.7750, 2.0315
STEPS = 5

Step = Callable[[], Any]


def parameters(shapes: Sequence[tuple[int, int]], device: str) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    made = [torch.nn.Parameter(0.02 * torch.randn(shape, device=device)) for shape in shapes]
    for p in made:
        p.grad = 0.001 * torch.randn_like(p)
    return made


def products(shapes: Sequence[tuple[int, int]], device: str) -> Step:
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


def contestants(shapes: Sequence[tuple[int, int]], device: str, *, capturable: bool) -> dict[str, Step]:
    ours = thalweg.torch.Muon(parameters(shapes, device), lr=1e-3, weight_decay=0.1, capturable=capturable)
    theirs = torch.optim.Muon(parameters(shapes, device), lr=1e-3, weight_decay=0.1)
    return {
        "products alone": products(shapes, device),
        "thalweg.torch.Muon": ours.step,
        "torch.optim.Muon": theirs.step,
    }


def captured(step: Step) -> Step | None:
    """A step as a CUDA graph, or None if it cannot be one."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    except RuntimeError as error:
        sys.stderr.write(f"not captured: {str(error).splitlines()[0]}\n")
        return None
    return graph.replay


def milliseconds(step: Step, device: str, calls: int) -> float:
    """Of one of several calls, one after the other, until the device is done."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    begin = time.perf_counter()
    for _ in range(calls):
        step()
    wait()
    return 1e3 * (time.perf_counter() - begin) / calls


def medians(steps: dict[str, Step], device: str, repeats: int, calls: int) -> dict[str, float]:
    for step in steps.values():
        for _ in range(3):
            milliseconds(step, device, calls)
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            found[name].append(milliseconds(step, device, calls))
    return {name: statistics.median(times) for name, times in found.items()}


def told(title: str, found: dict[str, float]) -> str:
    alone, theirs = found["products alone"], found.get("torch.optim.Muon")
    lines = [f"## {title}", "", "| | ms a step | times the products | torch.optim.Muon takes |", "|---|---|---|---|"]
    for name, time_taken in found.items():
        slower = "" if theirs is None else f"{theirs / time_taken:.2f} times as long"
        lines.append(f"| {name} | {time_taken:.3f} | {time_taken / alone:.2f} | {slower} |")
    return "\n".join([*lines, "", ""])


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=12, help="blocks of GPT-2 (default: %(default)s)")
    parser.add_argument("--width", type=int, default=768, help="of the model (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=30, help="turns of each that count (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=5, help="steps of a turn (default: %(default)s)")
    parser.add_argument("--json", help="file for the medians")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    given = parsed(arguments)
    shapes = [(rows * given.width // 768, columns * given.width // 768) for rows, columns in BLOCK] * given.layers
    how: dict[str, Any] = dict(device=given.device, repeats=given.repeats, calls=given.calls)
    record = {"eager": medians(contestants(shapes, given.device, capturable=False), **how)}
    sys.stdout.write(told("eager", record["eager"]))
    if given.device == "cuda":
        eager = contestants(shapes, given.device, capturable=True)
        graphs = {name: graph for name, step in eager.items() if (graph := captured(step)) is not None}
        record["CUDA graph"] = medians(graphs, **how)
        sys.stdout.write(told("CUDA graph", record["CUDA graph"]))
        record["peak MiB"] = {"all": torch.cuda.max_memory_allocated() / 2**20}
    if given.json:
        with open(given.json, "w") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
