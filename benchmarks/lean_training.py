"""Does training in few bits end where training in float32 does? A small GPT on bytes of Python's standard library.

    python -m benchmarks.lean_training --seeds 3 --json runs.json

LAMB steps the same model from the same first weights over the same batches: float32 weights with state in float32 and
in eight bits, and bfloat16 weights that are rounded to the nearest, at random, or with a record of what rounding cost.
The table has the loss on held-out text at the end, seed by seed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import thalweg.torch
from benchmarks.training.run import bytes_of, scheduled
from benchmarks.training.tasks import Block, begin
from thalweg.race.tasks.text import standard_library

#: By name: the dtype of the weights, and options of the optimizer.
CONTESTANTS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32 weights, float32 state": (torch.float32, {}),
    "float32 weights, int8 state": (torch.float32, {"state_dtype": "int8"}),
    "bfloat16 weights, nearest": (torch.bfloat16, {}),
    "bfloat16 weights, stochastic": (torch.bfloat16, {"rounding": "stochastic"}),
    "bfloat16 weights, compensated": (torch.bfloat16, {"rounding": "compensated"}),
    "bfloat16 weights, compensated, int8 state": (torch.bfloat16, {"rounding": "compensated", "state_dtype": "int8"}),
}
POINTS = 20


class ByteGPT(nn.Module):
    def __init__(self, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, width // 32, causal=True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.tokens(text) + self.places.weight
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def trained(name: str, seed: int, given: argparse.Namespace, text: Tensor) -> dict[str, Any]:
    dtype, options = CONTESTANTS[name]
    held_out = text[-len(text) // 10 :]
    text = text[: -len(text) // 10]
    torch.manual_seed(seed)
    model = begin(ByteGPT(given.width, given.layers, given.context), given.layers).to(given.device, dtype)
    optimizer = thalweg.torch.LAMB(
        model.named_parameters(), lr=given.lr, weight_decay=0.1, overrides="standard", **options
    )
    window = torch.arange(given.context + 1)
    generator = torch.Generator().manual_seed(seed)

    def loss_at(source: Tensor, starts: Tensor) -> Tensor:
        tokens = source[starts[:, None] + window].long().to(given.device)
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())

    fixed = torch.linspace(0, len(held_out) - given.context - 2, 64).long()
    curve = []
    for t in range(1, given.steps + 1):
        optimizer.param_groups[0]["lr"] = given.lr * scheduled(t, given.steps)
        starts = torch.randint(len(text) - given.context - 1, (given.batch,), generator=generator)
        optimizer.zero_grad()
        loss_at(text, starts).backward()
        optimizer.step()
        if t * POINTS % given.steps < POINTS:
            with torch.no_grad():
                curve.append((t, round(loss_at(held_out, fixed).item(), 4)))
    return {"name": name, "seed": seed, "curve": curve, "state_bytes": bytes_of(optimizer.state)}


def told(runs: Sequence[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(run["name"] for run in runs))
    lines = ["| | bytes of state | loss by seed | mean |", "|---|---:|---|---:|"]
    for name in names:
        own = [run for run in runs if run["name"] == name]
        ends = [run["curve"][-1][1] for run in own]
        shown = ", ".join(f"{end:.3f}" for end in ends)
        lines.append(f"| {name} | {own[0]['state_bytes']:,} | {shown} | {statistics.mean(ends):.3f} |")
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", type=int, default=3, help="first weights and batches (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--json", help="file for the runs")
    given = parser.parse_args(arguments)
    text = standard_library(4_000_000)
    runs: list[dict[str, Any]] = []
    for seed in range(given.seeds):
        for name in CONTESTANTS:
            runs.append(trained(name, seed, given, text))
            if given.json:
                Path(given.json).write_text(json.dumps({"given": vars(given), "runs": runs}, indent=1))
    sys.stdout.write(told(runs))


if __name__ == "__main__":
    main()
