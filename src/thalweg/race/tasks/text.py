"""A small transformer that learns to continue Python source, byte by byte; the source is that of Python itself."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

from thalweg.race.array_task import shuffled
from thalweg.race.model_task import ModelTask
from thalweg.show.extras import extra
from thalweg.show.modules import digest

with extra("torch"):
    import torch
    from torch import Tensor, nn
    from torch.nn import functional as F

SYMBOLS, WIDTH, HEADS, LAYERS, CONTEXT = 256, 64, 4, 2, 64
TRAIN_BYTES, TEST_BYTES = 400_000, 16_384

RATES = {
    "SGD": (0.01, 0.02, 0.05, 0.1, 0.2),
    "AdamW": (0.002, 0.005, 0.01, 0.02, 0.05),
    "LARS": (0.5, 1.0, 2.0, 5.0, 10.0),
    "LAMB": (0.005, 0.01, 0.02, 0.05, 0.1),
    "Adafactor": (0.02, 0.05, 0.1, 0.2, 0.5),
    "Kron": (0.001, 0.002, 0.005, 0.01, 0.02),
}


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
        attended = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


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
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def task() -> ModelTask:
    text = standard_library(TRAIN_BYTES + TEST_BYTES)
    # the last bytes are never trained on
    train, test = text[:-TEST_BYTES], text[-TEST_BYTES:].view(-1, CONTEXT)
    sample = train[:TEST_BYTES].view(-1, CONTEXT)

    def batches(seed: int, batch_size: int) -> Iterator[Tensor]:
        places = torch.arange(CONTEXT + 1)
        for starts in shuffled(len(train) - CONTEXT, seed, batch_size):
            yield train[torch.from_numpy(starts)[:, None] + places]

    def loss(model: nn.Module, windows: Tensor) -> Tensor:
        """In nats a byte."""
        return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())

    def evaluate(model: nn.Module) -> tuple[float, float]:
        device = next(model.parameters()).device
        foretold = model(test[:, :-1].to(device)).argmax(-1).cpu() == test[:, 1:]
        return loss(model, sample.to(device)).item(), foretold.float().mean().item()

    return ModelTask(
        name="text",
        title="Python source, byte by byte",
        about="A transformer of two layers learns to continue the source of Python's standard library.",
        model=lambda seed: Transformer(),
        batches=batches,
        loss=loss,
        evaluate=evaluate,
        steps=200,
        batch_size=16,
        seeds=1,
        target=2.7,
        loss_name="training loss, nats a byte",
        score_name="bytes foretold",
        rates=RATES,
        fingerprint=digest(text.byte().numpy().tobytes()),  # other versions of Python have other sources
    )
