"""A small transformer that learns to continue Python source, byte by byte; the source is that of Python itself."""

from __future__ import annotations

import itertools
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from thalweg.race.array_task import shuffle_batches
from thalweg.race.contestants import LARGE_RATES
from thalweg.race.model_task import ModelTask
from thalweg.show.devices import Device
from thalweg.show.extras import extra
from thalweg.show.modules import digest

with extra("torch"):
    import torch
    from torch import Tensor, nn
    from torch.nn import functional as F

SYMBOLS = 256


SMALL_RATES: Mapping[str, Sequence[float]] = {
    "SGD": (0.01, 0.02, 0.05, 0.1, 0.2),
    "AdamW": (0.002, 0.005, 0.01, 0.02, 0.05),
    "LARS": (0.5, 1.0, 2.0, 5.0, 10.0),
    "LAMB": (0.005, 0.01, 0.02, 0.05, 0.1),
    "Adafactor": (0.02, 0.05, 0.1, 0.2, 0.5),
    "Kron": (0.001, 0.002, 0.005, 0.01, 0.02),
}


@dataclass(frozen=True, kw_only=True)
class Size:
    """That for CPUs, unless something else is said."""

    width: int = 64
    heads: int = 4
    layers: int = 2
    context: int = 64
    train_bytes: int = 400_000
    test_bytes: int = 16_384
    steps: int = 200
    batch_size: int = 16
    target: float = 2.7
    #: Whether the loss is that of text which is not trained on, as it must be where there is time to learn by heart.
    unseen: bool = False
    rates: Mapping[str, Sequence[float]] = field(default_factory=lambda: SMALL_RATES)


#: For GPUs.
LARGE = Size(
    width=512,
    heads=8,
    layers=6,
    context=256,
    train_bytes=16_000_000,
    test_bytes=131_072,
    steps=800,
    batch_size=64,
    target=1.5,
    unseen=True,
    rates=LARGE_RATES,
)


def standard_library(size: int) -> Tensor:
    """The first bytes of its modules in alphabetical order, and of those in packages where that is not enough."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    inner = (path for path in folder.glob("*/**/*.py") if "packages" not in path.relative_to(folder).parts[0])
    text = bytearray()
    for path in itertools.chain(sorted(folder.glob("*.py")), sorted(inner)):
        text += path.read_bytes()
        if len(text) >= size:
            break
    return torch.frombuffer(text[:size], dtype=torch.uint8)


class Block(nn.Module):
    """Attention, then two linear layers, each on normalised inputs and added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class Transformer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(SYMBOLS, size.width), nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.layers)))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, SYMBOLS)
        for embedding in (self.symbols, self.places):
            nn.init.normal_(embedding.weight, std=0.1)

    def forward(self, text: Tensor) -> Tensor:
        x = self.symbols(text) + self.places.weight[: text.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def task(device: str = "cpu", size: Size | None = None) -> ModelTask:
    """The task in the size for a device."""
    place = Device(device)
    size = size or (LARGE if place.kind == "cuda" else Size())
    text = standard_library(size.train_bytes + size.test_bytes * (1 + size.unseen))
    data = text.to(device)
    # the last bytes are never trained on
    test, data = data[-size.test_bytes :], data[: -size.test_bytes]
    sample = data[-size.test_bytes :] if size.unseen else data[: size.test_bytes]
    train = data[: -size.test_bytes] if size.unseen else data

    def windows(part: Tensor) -> Tensor:
        return part.view(-1, size.context).long()

    def batches(seed: int, batch_size: int) -> Iterator[Tensor]:
        places = torch.arange(size.context + 1, device=device)
        for starts in shuffle_batches(len(train) - size.context, seed, batch_size):
            yield train[torch.from_numpy(starts).to(device)[:, None] + places].long()

    def logits(model: nn.Module, windows: Tensor) -> Tensor:
        with place.mixed_precision():
            found: Tensor = model(windows[:, :-1])
        return found.float()

    def loss(model: nn.Module, windows: Tensor) -> Tensor:
        """In nats a byte."""
        return F.cross_entropy(logits(model, windows).flatten(0, 1), windows[:, 1:].flatten())

    def evaluate(model: nn.Module) -> tuple[float, float]:
        unseen = windows(test)
        foretold = logits(model, unseen).argmax(-1) == unseen[:, 1:]
        return loss(model, windows(sample)).item(), foretold.float().mean().item()

    return ModelTask(
        name="text",
        title="Python source, byte by byte",
        about=f"A transformer of {size.layers} layers learns to continue the source of Python's standard library.",
        model=lambda seed: Transformer(size),
        batches=batches,
        loss=loss,
        evaluate=evaluate,
        steps=size.steps,
        batch_size=size.batch_size,
        seeds=1,
        target=size.target,
        loss_name=f"{'validation' if size.unseen else 'training'} loss, nats a byte",
        score_name="bytes foretold",
        rates=size.rates,
        # other versions of Python have other sources
        fingerprint=digest(text.numpy().tobytes(), repr(replace(size, rates={})).encode()),
    )
