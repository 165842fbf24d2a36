"""Train a small transformer to continue Python source, byte by byte, with each optimizer.

The text is the standard library of the Python that runs this, so that nothing is downloaded.
Usage: python examples/train_text.py --steps 200 --out text.json
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from compare import Problem, main
from torch import Tensor, nn
from torch.nn import functional as F

SYMBOLS, WIDTH, HEADS, LAYERS, CONTEXT, BATCH = 256, 64, 4, 2, 64, 16
TEXT_BYTES = 400_000


def standard_library(size: int) -> Tensor:
    """The first bytes of its modules, in alphabetical order."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= size:
            break
    return torch.frombuffer(text[:size], dtype=torch.uint8).long()


class Block(nn.Module):
    """Attention, then two linear layers, each on normalised inputs and added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, SYMBOLS)
        for embedding in (self.symbols, self.places):
            nn.init.normal_(embedding.weight, std=0.1)

    def forward(self, text: Tensor) -> Tensor:
        x = self.symbols(text) + self.places.weight[: text.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Transformer()


def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    text = standard_library(TEXT_BYTES)
    generator = torch.Generator().manual_seed(seed)
    places = torch.arange(CONTEXT + 1)
    while True:
        starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=generator)
        windows = text[starts + places]
        yield windows[:, :-1], windows[:, 1:]


def loss(network: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """In nats per byte."""
    return F.cross_entropy(network(inputs).flatten(0, 1), targets.flatten())


RATES = {
    "SGD": (0.1, 0.2, 0.5, 1.0, 2.0),
    "SGD, momentum 0.9": (0.02, 0.05, 0.1, 0.2, 0.5),
    "LARS": (2.0, 5.0, 10.0, 20.0, 50.0),
    "LAMB": (0.005, 0.01, 0.02, 0.05, 0.1),
    "Adafactor": (0.02, 0.05, 0.1, 0.2, 0.5),
    "Kron": (0.001, 0.002, 0.005, 0.01, 0.02),
}

if __name__ == "__main__":
    main("A small transformer on the standard library's source", Problem(model, batches, loss, RATES))
