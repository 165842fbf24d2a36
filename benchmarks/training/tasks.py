"""What is trained: a GPT on Python sources, and a convnet and a vision transformer on Fashion-MNIST.

All data lie on the device, and a step reads its batch by the numbers in ``task.chosen``, so that a GPU can replay the
whole forward and backward pass as one graph.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.training import corpus
from benchmarks.training.protocol import TEXTS
from thalweg.errors import CommandError
from thalweg.race.tasks import fashion

VOCABULARY, CONTEXT = 4096, 256
#: Width, layers and heads of the GPTs, by the size in a task's name.
SIZES = {"": (512, 6, 8), "124m": (896, 12, 14), "tiny": (64, 2, 2)}
#: Images of the training set that choose the learning rate and are not trained on.
VALIDATION = 5000


@dataclass
class Task:
    name: str
    about: str
    steps: int
    batch_size: int
    #: Where a batch may start: batches are drawn from the whole numbers below this.
    choices: int
    #: Draw each number once an epoch, or independently.
    epochs: bool
    model: Callable[[], nn.Module]
    #: The loss of the chosen part of the training data.
    loss: Callable[[nn.Module, Tensor], Tensor]
    #: The score on "validation" or "test"; quick: of a part of it.
    score: Callable[[nn.Module, str, bool], float]
    higher_is_better: bool
    clip: float | None
    decay: float
    fingerprint: str
    compiled: bool = False

    def order(self, seed: int) -> Tensor:
        """The numbers that make each step's batch, alike for every optimizer."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.steps, self.batch_size)
        if not self.epochs:
            return torch.randint(self.choices, shape, generator=generator)
        rounds = -(-self.steps * self.batch_size // self.choices)
        numbers = torch.cat([torch.randperm(self.choices, generator=generator) for _ in range(rounds)])
        return numbers[: self.steps * self.batch_size].view(shape)


# ---- text


class Block(nn.Module):
    """Attention, then two linear layers, each on normalised inputs and added to what came in."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=self.causal)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return out


def begin(model: nn.Module, layers: int) -> nn.Module:
    """GPT-2's first weights: a deviation of 0.02, less for what is added to the residual stream."""
    for name, p in model.named_parameters():
        if p.ndim > 1:
            nn.init.normal_(
                p, std=0.02 / (2 * layers) ** 0.5 if name.endswith(("project.weight", "down.weight")) else 0.02
            )
        elif name.endswith("bias"):
            nn.init.zeros_(p)
    return model


class GPT(nn.Module):
    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal=True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.tokens(text) + self.places.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def text(device: str, kind: str, *, tiny: bool = False) -> Task:
    """A GPT with GPT-2's first weights, or ("plain") with those that torch's modules have of themselves."""
    parts, digest = corpus.tokens(VOCABULARY, 3_000_000 if tiny else corpus.TEXT_BYTES)
    data = {part: torch.from_numpy(found.astype("int32")).to(device) for part, found in parts.items()}
    width, layers, heads = SIZES["tiny" if tiny else "" if kind == "plain" else kind]
    batch = 4 if tiny else 64
    window = torch.arange(CONTEXT + 1, device=device)

    def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
        tokens = tokens.long()
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def score(model: nn.Module, part: str, quick: bool) -> float:
        rounds = 1 if tiny else 4 if quick else 24
        found = data[part]
        starts = torch.linspace(0, len(found) - CONTEXT - 2, rounds * batch, device=device).long()
        losses = [loss_of(model, found[own[:, None] + window]) for own in starts.view(rounds, batch)]
        return torch.stack(losses).mean().item()

    return Task(
        name=f"text-{kind}" if kind else "text",
        about="nats a token on unseen files of Python source",
        steps=800,
        batch_size=batch,
        choices=len(data["train"]) - CONTEXT - 1,
        epochs=False,
        model=lambda: GPT(width, layers, heads) if kind == "plain" else begin(GPT(width, layers, heads), layers),
        loss=lambda model, chosen: loss_of(model, data["train"][chosen[:, None] + window]),
        score=score,
        higher_is_better=False,
        clip=1.0,
        decay=0.1,
        fingerprint=digest,
        compiled=True,
    )


# ---- images


def convnet() -> nn.Module:
    def convolution(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(
        *convolution(1, 32),
        nn.MaxPool2d(2),
        *convolution(32, 64),
        *convolution(64, 128),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128 * 49, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


class ViT(nn.Module):
    """Patches of 4 x 4 pixels, six blocks of width 192, and the mean of what they answer."""

    def __init__(self, width: int = 192, layers: int = 6, heads: int = 6) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, stride=4)
        self.places = nn.Embedding(49, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal=False) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places.weight
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x).mean(1))
        return logits


def images(device: str, folder: Path, name: str, batch_size: int, *, tiny: bool = False) -> Task:
    """Eight epochs of the convnet at any batch size, or sixteen of the transformer."""
    read = fashion.load(folder)
    shuffled = torch.randperm(len(read["train_labels"]), generator=torch.Generator().manual_seed(0))
    chosen = {"train": shuffled[VALIDATION:], "validation": shuffled[:VALIDATION]}

    def on_device(found: Any) -> Tensor:
        return torch.from_numpy(found.copy()).to(device)

    train, labels = on_device(read["train_images"]), on_device(read["train_labels"]).long()
    pixels = {part: train[own.to(device)] for part, own in chosen.items()}
    answers = {part: labels[own.to(device)] for part, own in chosen.items()}
    pixels["test"], answers["test"] = on_device(read["test_images"]), on_device(read["test_labels"]).long()
    if tiny:
        pixels, answers = ({part: found[:600] for part, found in own.items()} for own in (pixels, answers))

    def seen(some: Tensor) -> Tensor:
        return (some[:, None].float() / 255 - 0.2860) / 0.3530

    def score(model: nn.Module, part: str, quick: bool) -> float:
        right = [
            (model(seen(some)).argmax(1) == wanted).sum()
            for some, wanted in zip(pixels[part].split(2500), answers[part].split(2500), strict=True)
        ]
        return 100 * torch.stack(right).sum().item() / len(answers[part])

    count = len(answers["train"])
    epochs = 8 if name == "fashion" else 16
    return Task(
        name=f"{name}-{batch_size}",
        about="percent of unseen images told right",
        steps=max(epochs * count // batch_size, 2),
        batch_size=batch_size,
        choices=count,
        epochs=True,
        model=convnet if name == "fashion" else lambda: begin(ViT(), 6),
        loss=lambda model, own: F.cross_entropy(model(seen(pixels["train"][own])).float(), answers["train"][own]),
        score=score,
        higher_is_better=True,
        clip=None if name == "fashion" else 1.0,
        decay=0.05,
        fingerprint=hashlib.sha256(read["train_images"].tobytes()).hexdigest()[:12] + (" tiny" if tiny else ""),
        compiled=True,
    )


def check_task(name: str, data: Path | None) -> None:
    """Whether there is such a task, and its data: without reading them."""
    kind, _, batch = name.partition("-")
    if name in TEXTS:
        return
    if kind not in ("fashion", "vit") or not batch.isdecimal() or int(batch) < 1:
        raise CommandError(
            f"there is no task {name!r}: tasks are {', '.join(TEXTS)}, and fashion and vit with a batch size: "
            "fashion-512"
        )
    if data is None:
        raise CommandError(f"{name} needs --data, the folder of the four files of Fashion-MNIST")
    for file, _ in fashion.FILES.values():
        fashion.find(data, file)


def task(name: str, device: str, data: Path | None, *, tiny: bool = False) -> Task:
    """A task by its name: "text", "fashion-512", "vit-1024", with any batch size."""
    check_task(name, data)
    kind, _, batch = name.partition("-")
    if kind == "text":
        return text(device, batch, tiny=tiny)
    assert data is not None
    return images(device, data, kind, int(batch), tiny=tiny)
