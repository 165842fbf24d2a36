"""What a sharded step takes the host beside an unsharded one, where messages take no time.

    python -m benchmarks.sharded_host --device cuda

One process of torch's fake process group, whose messages return at once and carry nothing, steps its half of the
tensors of GPT-2 in float32; gradients lie elsewhere at every step, as after ``zero_grad()``. Muon has the matrices
alone. Sharded and unsharded steps take turns. The figures are ms from the call of step() to its return, the GPU being
idle before: medians of unsharded steps, of sharded ones, and of what these take more. ``--calls`` tells what functions
take most of a sharded step.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import thalweg.torch
from thalweg.plan.models import builtin

OPTIONS: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.9}}
WARM = 8


def params_of(shapes: list[tuple[int, ...]], device: str, mesh: Any) -> tuple[list[Any], list[list[Tensor]]]:
    """Parameters, and gradients for two steps; sharded over a mesh if there is one."""
    from torch.distributed.tensor import DTensor, Shard

    def draw(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, device=device) / 32

    if mesh is None:
        return [torch.nn.Parameter(draw(shape)) for shape in shapes], [list(map(draw, shapes)) for _ in range(2)]
    halves: list[Any] = [
        DTensor.from_local(draw((shape[0] // 2, *shape[1:])), mesh, [Shard(0)], run_check=False) for shape in shapes
    ]
    params: list[Any] = list(map(torch.nn.Parameter, halves))
    # as FSDP2 has it, with the very specification of the parameter
    grads = [[DTensor(torch.randn_like(p.to_local()) / 32, p._spec, requires_grad=False) for p in params] for _ in "ab"]
    return params, grads


class Contestant:
    """An optimizer with parameters of its own, sharded over a mesh if there is one."""

    def __init__(self, rule: str, given: argparse.Namespace, mesh: Any) -> None:
        shapes = [tensor.shape for tensor in builtin(given.model).tensors]
        if rule == "Muon":
            shapes = [shape for shape in shapes[2:] if len(shape) == 2]  # the first two are embeddings
        self.params, self.grads = params_of(shapes, given.device, mesh)
        named = [(f"p{i}", p) for i, p in enumerate(self.params)]
        self.optimizer = getattr(thalweg.torch, rule)(named, lr=1e-3, **OPTIONS.get(rule, {}))
        self.is_on_gpu = given.device == "cuda"

    def step(self, turn: int) -> float:
        for p, g in zip(self.params, self.grads[turn % 2], strict=True):
            p.grad = g
        if self.is_on_gpu:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        self.optimizer.step()
        return 1e3 * (time.perf_counter() - begin)

    def longest_calls(self, count: int) -> list[str]:
        with cProfile.Profile() as profile:
            self.step(0)
        stats: Any = pstats.Stats(profile)
        calls = sorted(stats.stats.items(), key=lambda pair: -pair[1][2])[:count]
        lines = [f"{Path(at[0]).name}:{at[2]} {own[1]} calls {1e3 * own[2]:.3f}" for at, own in calls]
        return [f"{sum(own[1] for own in stats.stats.values())} calls", *lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rules", default="AdamW,LAMB,Adafactor,Muon,Kron")
    parser.add_argument("--model", default="gpt2", help="one that thalweg plan knows (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--calls", type=int, default=0, help="how many functions to tell")
    given = parser.parse_args()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh(given.device, (2,))
    for rule in given.rules.split(","):
        both = [Contestant(rule, given, each) for each in (None, mesh)]
        times = [[each.step(turn) for each in both] for turn in range(WARM + given.steps)][WARM:]  # in turns
        unsharded, sharded, more = zip(*((a, b, b - a) for a, b in times), strict=True)
        figures = " ".join(f"{statistics.median(own):7.3f}" for own in (unsharded, sharded, more))
        lines = both[1].longest_calls(given.calls) if given.calls else []
        sys.stdout.write("\n    ".join([f"{rule:10} {figures}", *lines]) + "\n")
        sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
