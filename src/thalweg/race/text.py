"""A small transformer that learns to continue Python source, byte by byte; the source is that of Python itself."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from thalweg.race.task import ModelTask, shuffle_batches
from thalweg.show.extras import extra
from thalweg.show.modules import digest

with extra("torch"):
    import torch
    from torch import Tensor, nn
    from torch.nn import functional as F

SYMBOLS = 256
#: Of the transformer.
WIDTH, HEADS, LAYERS, CONTEXT = 64, 4, 2, 64
TRAIN_BYTES, TEST_BYTES = 400_000, 16_384


def standard_library(size: int) -> Tensor:
    """The first bytes of its modules in alphabetical order."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(text[:size]), dtype=torch.uint8)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        look: dict[str, Any] = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, **look) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, SYMBOLS)
        for embedding in (self.symbols, self.places):
            nn.init.normal_(embedding.weight, std=0.1)

    def forward(self, text: Tensor) -> Tensor:
        length = text.shape[1]
        x = self.symbols(text) + self.places.weight[:length]
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        for block in self.blocks:
            x = block(x, src_mask=mask)
        logits: Tensor = self.head(self.norm(x))
        return logits


def task() -> ModelTask:
    text = standard_library(TRAIN_BYTES + TEST_BYTES)
    # the last bytes are never trained on
    train, test = text[:-TEST_BYTES], text[-TEST_BYTES:]

    def batches(seed: int, batch_size: int) -> Iterator[Tensor]:
        places = torch.arange(CONTEXT + 1)
        for starts in shuffle_batches(len(train) - CONTEXT, seed, batch_size):
            yield train[torch.from_numpy(starts)[:, None] + places].long()

    def loss(model: nn.Module, windows: Tensor) -> Tensor:
        """The mean loss, in nats a byte."""
        return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())

    def evaluate(model: nn.Module) -> tuple[float, float]:
        device = next(model.parameters()).device
        trained, unseen = (part.view(-1, CONTEXT).long().to(device) for part in (train[:TEST_BYTES], test))
        is_foretold = model(unseen[:, :-1]).argmax(-1) == unseen[:, 1:]
        return loss(model, trained).item(), is_foretold.float().mean().item()

    return ModelTask(
        name="text",
        title="Python source, byte by byte",
        about=f"A transformer of {LAYERS} layers learns to continue the source of Python's standard library.",
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
        # other versions of Python have other sources
        fingerprint=digest(text.numpy().tobytes()),
    )
