"""What a step costs the host and the GPU when parameters are DTensors of FSDP2, beside torch's and timm's optimizers.

    python benchmarks/fsdp2_gpu.py --counts 150,400,1000

A world of one rank on one GPU: the DTensors, their dispatch and the host's work are those of any world, and no message
is waited for. The model is a stack of blocks as transformers have them, with as many parameters as asked for; matrices
are WIDTH wide, so that the GPU has little to do and the host's share shows. Optimizers take turns. Columns, in ms:

    host    from the call of step() to its return, the GPU being idle before
    GPU     its kernels alone, as torch's profiler adds them up
    step    ten steps in a row and the wait for the last, a tenth of it: the larger of the two, unless they wait
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.show.published import is_installed, prepare_timm

WIDTH = 512
IN_A_ROW = 10


def optimizers() -> dict[str, Callable[[Any], Any]]:
    import thalweg.torch as ours

    def peer(module: str, name: str, **options: Any) -> Callable[[Any], Any]:
        return lambda named: getattr(importlib.import_module(module), name)([p for _, p in named], lr=1e-3, **options)

    found: dict[str, Callable[[Any], Any]] = {
        "thalweg LAMB": lambda named: ours.LAMB(named, lr=1e-3),
        "thalweg AdamW": lambda named: ours.LAMB(named, lr=1e-3, trust=False),
        "thalweg LARS": lambda named: ours.LARS(named, lr=1e-3),
        "thalweg Adafactor": lambda named: ours.Adafactor(named, lr=1e-3),
        "torch AdamW(fused=True)": peer("torch.optim", "AdamW", fused=True),
        "torch AdamW(foreach=True)": peer("torch.optim", "AdamW", foreach=True),
    }
    if is_installed("timm"):
        prepare_timm()
        found["timm Lamb"] = peer("timm.optim.lamb", "Lamb", max_grad_norm=None)
    return found


class Block(nn.Module):
    """Six parameters: two matrices with biases and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def sharded_model(count: int) -> nn.Module:
    """A model of so many parameters, with the gradients that FSDP2 left after one backward pass."""
    from torch.distributed.fsdp import fully_shard

    rest = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count % 6)]
    model = nn.Sequential(*(Block() for _ in range(count // 6)), *rest).cuda()
    for block in model:
        fully_shard(block)
    fully_shard(model)
    model(torch.randn(8, WIDTH, device="cuda")).square().mean().backward()
    return model


class Contestant:
    """An optimizer with a model of its own, and the times it was seen to take."""

    def __init__(self, count: int, build: Callable[[Any], Any]) -> None:
        self.model = sharded_model(count)
        self.optimizer = build(list(self.model.named_parameters()))
        self.host: list[float] = []
        self.whole: list[float] = []
        for _ in range(3):
            self.optimizer.step()

    def measure(self) -> None:
        torch.cuda.synchronize()
        start = time.perf_counter()
        self.optimizer.step()
        self.host.append(1e3 * (time.perf_counter() - start))
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(IN_A_ROW):
            self.optimizer.step()
        torch.cuda.synchronize()
        self.whole.append(1e3 * (time.perf_counter() - start) / IN_A_ROW)

    def on_gpu(self) -> float:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(IN_A_ROW):
                self.optimizer.step()
            torch.cuda.synchronize()
        return float(sum(each.self_device_time_total for each in seen.key_averages())) / 1e3 / IN_A_ROW


def table(count: int, names: Sequence[str], repeats: int) -> str:
    known = optimizers()
    contestants = {name: Contestant(count, known[name]) for name in names}
    for _ in range(repeats):
        for contestant in contestants.values():
            contestant.measure()
    lines = [f"| {count} DTensors | host ms | GPU ms | step ms |", "|---|---:|---:|---:|"]
    for name, each in contestants.items():
        figures = statistics.median(each.host), each.on_gpu(), statistics.median(each.whole)
        lines.append(f"| {name} | " + " | ".join(f"{figure:.2f}" for figure in figures) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--counts", default="150,400,1000", help="parameters of the models (default: %(default)s)")
    parser.add_argument("--only", help="names of optimizers, separated by commas (default: all that are installed)")
    parser.add_argument("--repeats", type=int, default=11, help="rounds that count (default: %(default)s)")
    given = parser.parse_args(arguments)
    for key, value in (("MASTER_ADDR", "localhost"), ("MASTER_PORT", "29571"), ("RANK", "0"), ("WORLD_SIZE", "1")):
        os.environ.setdefault(key, value)
    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", 0))
    names = given.only.split(",") if given.only else list(optimizers())
    for count in map(int, given.counts.split(",")):
        sys.stdout.write(table(count, names, given.repeats) + "\n\n")
        sys.stdout.flush()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
