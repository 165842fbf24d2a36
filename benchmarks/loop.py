"""Whether the threads of an optimizer get in the way of torch's: a training loop.

A step that keeps threads of its own may look fast by itself and slow down the forward pass that follows, by threads
that still spin, or by pushing others off their cores. So forward and backward are timed here as well as the whole.

    python benchmarks/loop.py --turns 30
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thalweg.bench.quiet import run_undisturbed

LAYERS, VOCABULARY, CONTEXT, BATCH = 8, 1024, 16, 2
#: Iterations one after the other before the next contestant's turn; the first of them is not counted.
TURN = 5


class Transformer(nn.Module):
    """Of width 256 about 7 million parameters in some 100 tensors, most of them small."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens)))


@dataclass(frozen=True)
class Iteration:
    """Milliseconds of forward and backward, and of the step."""

    passes: float
    step: float

    @property
    def whole(self) -> float:
        return self.passes + self.step


@dataclass
class Runner:
    name: str
    build: Callable[[list[nn.Parameter]], Any]
    width: int

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = Transformer(self.width)
        self.optimizer = self.build(list(self.model.parameters()))
        self.random = torch.Generator().manual_seed(0)

    def turn(self) -> list[Iteration]:
        return [self.iterate() for _ in range(TURN)][1:]

    def iterate(self) -> Iteration:
        tokens = torch.randint(0, VOCABULARY, (BATCH, CONTEXT), generator=self.random)
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        middle = time.perf_counter()
        self.optimizer.step()
        return Iteration(1e3 * (middle - begin), 1e3 * (time.perf_counter() - middle))


def runners(engine: str, width: int) -> list[Runner]:
    import thalweg.torch

    def lamb(engine: str) -> Callable[[list[nn.Parameter]], Any]:
        return lambda ps: thalweg.torch.LAMB(ps, lr=1e-3, weight_decay=0.01, engine=engine)

    engines = dict.fromkeys((engine, "foreach"))
    return [
        Runner("torch.optim.AdamW(fused=True)", lambda ps: torch.optim.AdamW(ps, lr=1e-3, fused=True), width),
        *(Runner(f'thalweg.torch LAMB(engine="{name}")', lamb(name), width) for name in engines),
    ]


def train(turns: int, engine: str, width: int) -> dict[str, Any]:
    """Everyone in turn, and over again; two turns each to warm up."""
    found = runners(engine, width)

    def everyone() -> list[list[Iteration]]:
        return [runner.turn() for runner in found]

    for _ in range(2):
        everyone()
    rounds, _ = run_undisturbed(everyone, turns)
    took = [[one for each in rounds for one in each.result[index]] for index in range(len(found))]
    rows = [
        {
            "name": runner.name,
            "engine": str(getattr(runner.optimizer, "engine", "")),
            "whole_ms": statistics.median(one.whole for one in own),
            "whole_ratio": statistics.median(a.whole / b.whole for a, b in zip(own, took[0], strict=True)),
            "passes_ms": statistics.median(one.passes for one in own),
            "passes_ratio": statistics.median(a.passes / b.passes for a, b in zip(own, took[0], strict=True)),
            "step_ms": statistics.median(one.step for one in own),
            "samples": [asdict(one) for one in own],
        }
        for runner, own in zip(found, took, strict=True)
    ]
    params = list(found[0].model.parameters())
    return {
        "parameters": sum(p.numel() for p in params),
        "tensors": len(params),
        "tokens": BATCH * CONTEXT,
        "iterations": len(took[0]),
        "others": max(each.others for each in rounds),
        "rows": rows,
    }


def loop_table(found: dict[str, Any]) -> str:
    lines = [
        "## A training loop\n",
        f"A transformer of {found['parameters']:,} parameters in {found['tensors']} tensors, {found['tokens']} "
        f"tokens a batch, {found['iterations']} iterations each. Medians; ratios are to the first row, of iterations "
        f"close to each other in time. Other processes took at most {found['others']:.0%} of the cores.\n",
        "| optimizer | engine | iteration, ms | ratio | forward and backward, ms | ratio | step, ms |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row['name']} | {row['engine']} | {row['whole_ms']:.2f} | {row['whole_ratio']:.2f} "
        f"| {row['passes_ms']:.2f} | {row['passes_ratio']:.2f} | {row['step_ms']:.2f} |"
        for row in found["rows"]
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=30, help="of each contestant (default: %(default)s)")
    parser.add_argument("--engine", default="auto", help="of ours (default: %(default)s)")
    parser.add_argument("--width", type=int, default=256, help="of the transformer (default: %(default)s)")
    given = parser.parse_args(arguments)
    sys.stdout.write(f"{loop_table(train(given.turns, given.engine, given.width))}\n")


if __name__ == "__main__":
    main()
