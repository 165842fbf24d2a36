"""Train a small transformer on text with FSDP2: sharded weights, gradients and state, on CPUs or GPUs.

The text is the Python standard library's own source.
Usage: torchrun --nproc-per-node 2 examples/fsdp2.py --optimizer Kron --steps 200 --out checkpoint
"""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

import thalweg.torch

RATES = {"LARS": 5.0, "LAMB": 0.02, "Adafactor": 0.03, "Kron": 0.01}
BATCH, LENGTH, WIDTH, HEADS, LAYERS = 16, 64, 64, 4, 2
#: Letters as bytes; other characters than ASCII are dropped.
LETTERS = 128


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # each head has its own rows of qkv, so that ranks can shard whole heads
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (-1, 3 * WIDTH // HEADS)).transpose(1, 2).chunk(3, -1)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(LETTERS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.last, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, LETTERS, bias=False)

    def forward(self, letters: Tensor) -> Tensor:
        place = torch.arange(letters.shape[1], device=letters.device)
        return self.head(self.last(self.layers(self.embed(letters) + self.place(place))))


def text() -> Tensor:
    folder = Path(sysconfig.get_paths()["stdlib"])
    source = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:40])
    return torch.tensor([letter for letter in source if letter < LETTERS])


def batch(letters: Tensor, step: int, part: int, parts: int) -> Tensor:
    """This rank's part of the batch of a step; the whole batch does not depend on the number of ranks."""
    starts = torch.randint(len(letters) - LENGTH - 1, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    return letters[starts + torch.arange(LENGTH + 1)].chunk(parts)[part]


def loss_of(model: nn.Module, letters: Tensor) -> Tensor:
    return F.cross_entropy(model(letters[:, :-1]).flatten(0, 1), letters[:, 1:].flatten())


def begin() -> str:
    """Join the other ranks, and return the device of this one."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return "cpu"
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    return "cuda"


def sharded(device: str) -> nn.Module:
    """Make a sharded model whose weights do not depend on the number of ranks."""
    torch.manual_seed(0)
    model = Transformer().to(device)
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def tell(step: int, loss: Tensor) -> None:
    """Print the mean over all ranks, on the first rank."""
    dist.all_reduce(loss)
    if dist.get_rank() == 0:
        sys.stdout.write(f"step {step}: loss {loss.item() / dist.get_world_size():.3f}\n")


def parsed(description: str | None, **others: dict[str, Any]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--optimizer", choices=RATES, default="Kron")
    parser.add_argument("--lr", type=float, help="the highest learning rate (default: one that suits the optimizer)")
    parser.add_argument("--steps", type=int, default=200)
    for name, options in others.items():
        parser.add_argument(f"--{name}", **options)
    given = parser.parse_args()
    given.lr = given.lr or RATES[given.optimizer]
    return given


def main() -> None:
    given = parsed(__doc__, out=dict(type=Path, help="a new folder for a checkpoint"))
    device, letters = begin(), text()
    model = sharded(device)
    optimizer = getattr(thalweg.torch, given.optimizer)(model.named_parameters(), given.lr)
    for step in range(given.steps):
        optimizer.lr = given.lr * (1 - step / given.steps)
        loss = loss_of(model, batch(letters, step, dist.get_rank(), dist.get_world_size()).to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 in (1, given.steps) or (step + 1) % 50 == 0:
            tell(step + 1, loss.detach())
    if given.out:
        weights, state = get_state_dict(model, optimizer)
        writer = dcp.FileSystemWriter(given.out, overwrite=False)
        dcp.save({"model": weights, "optimizer": state}, storage_writer=writer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
