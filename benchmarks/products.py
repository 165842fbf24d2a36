"""The speed of products of stacks of matrices on a GPU, and of the Newton-Schulz iterations that are made of them.

    python benchmarks/products.py           # of bfloat16
    python benchmarks/products.py --tf32    # of float32, in TF32

Numbers are compared with float64 before anything is timed. Each product is timed as a CUDA graph, beside the library's
call for the same result (bmm, baddbmm), in turns. TFLOP/s of a symmetric product count half of the work of a full one,
and the share of the floor is of what 700 TFLOP/s would take.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thalweg.kernels.products.stacks import multiply
from thalweg.rules import Muon
from thalweg.spaces import torch as library
from thalweg.torch.engines.triton_whole import space_of_kernels

#: FLOP/s that floors are told at.
FLOOR = 700e12
#: How many matrices of which rows and columns a model has.
MODELS = {
    "GPT-2": {(2304, 768): 12, (768, 768): 12, (3072, 768): 12, (768, 3072): 12},
    "Llama 1B": {(2048, 2048): 32, (512, 2048): 32, (8192, 2048): 32, (2048, 8192): 16},
}

Run = Callable[[], Any]


class Case(NamedTuple):
    """Products of one kind."""

    name: str
    a: Tensor
    b: Tensor
    plus: Tensor | None
    symmetric: bool
    alpha: float = 0.5
    beta: float = 2.0

    def flops(self) -> float:
        whole = 2 * self.a.shape[0] * self.a.shape[1] * self.a.shape[2] * self.b.shape[2]
        return whole / 2 if self.symmetric else whole

    def run_library(self) -> Tensor:
        if self.plus is None:
            return torch.bmm(self.a, self.b)
        return torch.baddbmm(self.plus, self.a, self.b, alpha=self.alpha, beta=self.beta)

    def run(self) -> Tensor:
        options: dict[str, Any] = dict(symmetric=self.symmetric, beta=self.beta)
        options["alpha"] = 1.0 if self.plus is None else self.alpha
        return multiply(self.a, self.b, self.plus, **options)

    def error(self, found: Tensor) -> float:
        """Of the last matrix, relative to its largest element."""
        expected = self.a[-1].double() @ self.b[-1].double()
        if self.plus is not None:
            expected = self.alpha * expected + self.beta * self.plus[-1].double()
        return ((found[-1].double() - expected).abs().max() / expected.abs().max()).item()


def draw(count: int, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(count, rows, columns, device="cuda") / columns**0.5).to(dtype)


def list_cases(dtype: torch.dtype) -> Iterator[Case]:
    for name, short, longer, many in (("GPT-2", 768, 3072, 12), ("Llama", 2048, 8192, 16), ("k v", 512, 2048, 32)):
        wide, tall, r = (draw(many, *sizes, dtype) for sizes in ((short, longer), (longer, short), (short, short)))
        r = (r + r.mT) / 2
        yield Case(f"{name}: x x^T", wide, wide.mT, None, True)
        yield Case(f"{name}: x^T x", tall.mT, tall, None, True)
        yield Case(f"{name}: r r + r", r, r, r, True)
        yield Case(f"{name}: q x", r, wide, None, False)
        yield Case(f"{name}: q x + x", r, wide, wide, False)
        yield Case(f"{name}: x q + x", tall, r, tall, False)


# ---- timing


def record(run: Run, calls: int) -> Run:
    """Several calls as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return graph.replay


def time_in_turns(runs: dict[str, Run], rounds: int, calls: int) -> dict[str, float]:
    """The median of each, in milliseconds of one call."""
    recorded = {name: record(run, calls) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, replay in recorded.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            replay()
            end.record()
            end.synchronize()
            if turn:  # the first one warms up
                times[name].append(begin.elapsed_time(end) / calls)
    return {name: statistics.median(own) for name, own in times.items()}


def time_case(case: Case, given: argparse.Namespace) -> dict[str, float]:
    """Of the library, and of ours if its numbers are right."""
    runs: dict[str, Run] = {"library": case.run_library}
    error = case.error(case.run())
    if error < 2.0**-7:
        runs["thalweg"] = case.run
    else:
        sys.stdout.write(f"WRONG NUMBERS: {case.name}: off by {error:.3g}\n")
    return time_in_turns(runs, given.rounds, given.calls)


def time_iterations(model: str, given: argparse.Namespace) -> dict[str, float]:
    """Iterations over all matrices of a model, stacked by shape."""
    xs = [draw(count, *shape) for shape, count in MODELS[model].items()]
    runs: dict[str, Run] = {}
    for space, products in ((library, "by the library"), (space_of_kernels(), "")):
        for method in ("plain", "auto"):
            rule: Any = Muon(ns_method=method)  # type: ignore[arg-type]
            name = f"ns_method={method!r} {products}".strip()
            own = [rule.divide_by_norm(library, x)[0] for x in xs]
            runs[name] = lambda s=space, rule=rule, own=own: [rule.orthogonalize(s, x) for x in own]  # type: ignore[misc]
            values = torch.cat([find_singular_values(x[0]) for x in runs[name]()])
            sys.stdout.write(f"{model}, {name}: singular values from {values.min():.3f} to {values.max():.3f}\n")
    return time_in_turns(runs, given.rounds, 1)


def find_singular_values(x: Tensor) -> Tensor:
    x = (x.mT if x.shape[0] > x.shape[1] else x).double()
    return torch.linalg.eigvalsh(x @ x.mT).clamp(min=0).sqrt()


def floor_of(model: str, method: str) -> float:
    """Milliseconds of an iteration with symmetric products at the floor's speed."""
    work = 0.0
    for shape, count in MODELS[model].items():
        short, ratio = min(shape), max(shape) / min(shape)
        work += count * short**3 * (6 * ratio + 14 if method == "auto" and ratio >= 2 else 15 * ratio + 5)
    return 1e3 * work / FLOOR


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tf32", action="store_true", help="products of float32 in TF32, and no iterations")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each that count (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=10, help="calls of a turn (default: %(default)s)")
    parser.add_argument("--json", help="file for all times")
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    if given.tf32:
        torch.set_float32_matmul_precision("high")
    found: dict[str, dict[str, float]] = {}
    sys.stdout.write("| product | by | ms | TFLOP/s | of the floor |\n|---|---|---:|---:|---:|\n")
    for case in list_cases(torch.float32 if given.tf32 else torch.bfloat16):
        found[case.name] = time_case(case, given)
        for name, taken in sorted(found[case.name].items(), key=lambda item: item[1]):
            rate, share = case.flops() / taken / 1e9, 1e3 * case.flops() / FLOOR / taken
            sys.stdout.write(f"| {case.name} | {name} | {taken:.4f} | {rate:.0f} | {share:.0%} |\n")
        sys.stdout.flush()
    iterations = {} if given.tf32 else {model: time_iterations(model, given) for model in MODELS}
    sys.stdout.write("\n| five steps of | | ms | floor, ms | of the floor |\n|---|---|---:|---:|---:|\n")
    for model, times in iterations.items():
        for name, taken in times.items():
            floor = floor_of(model, "auto" if "auto" in name else "plain")
            sys.stdout.write(f"| {model} | {name} | {taken:.3f} | {floor:.2f} | {floor / taken:.0%} |\n")
    if given.json:
        with open(given.json, "w") as file:
            json.dump({"products": found, "iterations": iterations}, file, indent=1)


if __name__ == "__main__":
    main()
