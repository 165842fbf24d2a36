"""What is trained: a GPT on Python sources, and a convnet and a vision transformer on Fashion-MNIST.

They are tasks of the race: ``thalweg race benchmarks.training.tasks:text`` races the rules of the package on one. All
data lie on the device, and a batch is the numbers of its examples, so that a GPU can replay the whole forward and
backward pass as one graph.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.training import corpus
from thalweg.errors import CommandError
from thalweg.race.contestants import Contestant
from thalweg.race.run import Run
from thalweg.race.task import ModelTask, evaluating, shuffle_batches

Loss = Callable[[nn.Module, Tensor], Tensor]
TEXTS = ("text", "text-plain", "text-124m")
TASKS = (*TEXTS, "fashion-512", "fashion-2048", "fashion-8192", "vit-1024")


class Size(NamedTuple):
    """A GPT, and what it is trained on."""

    width: int
    layers: int
    heads: int
    vocabulary: int
    context: int
    #: Whether tokens come in and go out by one table.
    is_tied: bool
    text_bytes: int
    batch_size: int
    steps: int
    #: Tokens from one window that is trained on to the next.
    stride: int
    #: Batches of a final score.
    rounds: int


#: By the size in a task's name. The second is GPT-2's, its vocabulary rounded up to a multiple of 128, with 100 million
#: tokens in 3,052 steps.
SIZES = {
    "": Size(512, 6, 8, 4096, 256, False, 32_000_000, 64, 800, 1, 24),
    "124m": Size(768, 12, 12, 50_304, 1024, True, 240_000_000, 32, 3052, 1024, 24),
    "tiny": Size(64, 2, 2, 4096, 256, False, 3_000_000, 4, 800, 1, 1),
}
#: Images of the training set that choose the learning rate and are not trained on.
VALIDATION = 5000


@dataclass(frozen=True, kw_only=True)
class SuiteTask(ModelTask):
    """A task of the suite. A batch is the numbers of its examples, which lie on the device."""

    #: How good a model is on "validation" or "test"; quick: by a part of the data.
    score: Callable[[nn.Module, str, bool], float]
    #: The weight decay that all have, but for those whose rule asks for another.
    decay: float
    warm_up: float = 0.05
    seeds: int = 1
    #: What losses and scores read. It is moved to the device of the model that is trained.
    data: dict[str, Tensor] = field(repr=False, compare=False)
    #: Whether a GPU replays the forward and backward pass as one graph, compiled; and that graph, once it is there.
    captures: bool = True
    captured: list[Graph] = field(default_factory=list, repr=False, compare=False)

    def begin(self, contestant: Contestant, run: Run) -> nn.Module:
        """A model, and the data beside it. On a GPU it is always the same module, whose passes are captured once."""
        model: nn.Module = super().begin(contestant, run)
        device = next(model.parameters()).device
        self.data.update({key: tensor.to(device) for key, tensor in self.data.items()})
        if device.type != "cuda" or not self.captures:
            return model
        if not self.captured:
            self.captured.append(Graph(self, model))
        self.captured[0].model.load_state_dict(model.state_dict())
        return self.captured[0].model

    def compute_gradients(self, model: nn.Module, batch: Tensor, run: Run, step: int) -> None:
        if self.captured:
            self.captured[0].run(batch)
            if self.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), self.max_grad_norm)
        else:
            super().compute_gradients(model, batch, run, step)

    def measure(self, model: nn.Module, *, is_over: bool) -> tuple[float, float]:
        """Validation, of which a part chooses nothing and is enough on the way; test data only at the end."""
        with evaluating(model), mixed_precision(next(model.parameters()).device.type):
            validation = self.score(model, "validation", not is_over)
            test = self.score(model, "test", False) if is_over else math.nan
        return validation if self.best_score == "least" else 1 - validation, test


def mixed_precision(kind: str) -> torch.autocast:
    """Products in bfloat16 on a GPU."""
    return torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda", cache_enabled=False)


class Graph:
    """The forward and backward pass of a model on a GPU, compiled and captured. It writes the gradients anew."""

    def __init__(self, task: SuiteTask, model: nn.Module) -> None:
        self.task, self.model = task, model
        self.batch = next(iter(task.batches(0, task.batch_size))).to(next(model.parameters()).device)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            loss = self.compile_loss()
            for _ in range(3):
                self.run_backward(loss)
        torch.cuda.current_stream().wait_stream(stream)
        model.zero_grad(set_to_none=True)  # so that the graph owns them
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.run_backward(loss)

    def compile_loss(self) -> Loss:
        try:
            compiled = torch.compile(self.task.loss)
            self.run_backward(compiled)
        except Exception as error:  # no compiler: slower, and the same
            sys.stderr.write(f"{self.task.name}: not compiled: {type(error).__name__}: {error}\n")
            return self.task.loss
        return compiled

    def run_backward(self, loss: Loss) -> None:
        self.model.zero_grad(set_to_none=True)
        with mixed_precision("cuda"):
            value = loss(self.model, self.batch)
        value.backward()

    def run(self, batch: Tensor) -> None:
        self.batch.copy_(batch)
        self.graph.replay()


def draw_numbers(count: int, seed: int, batch_size: int) -> Iterator[Tensor]:
    """Batches of the whole numbers below a count, each once an epoch."""
    return (torch.from_numpy(numbers) for numbers in shuffle_batches(count, seed, batch_size))


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
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(size.vocabulary, size.width), nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.heads, causal=True) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary, bias=False)
        if size.is_tied:
            self.head.weight = self.tokens.weight

    def forward(self, text: Tensor) -> Tensor:
        x = self.tokens(text) + self.places.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def text(kind: str = "", folder: Path | None = None, *, tiny: bool = False) -> SuiteTask:
    """A GPT with GPT-2's first weights, or ("plain") with those that torch's modules have of themselves.

    folder: where the tokens are kept.
    """
    size = SIZES["tiny" if tiny else "" if kind == "plain" else kind]
    parts, digest = corpus.load_tokens(size.vocabulary, size.text_bytes, folder or Path(tempfile.gettempdir()))

    data = {part: torch.from_numpy(found.astype("int32")) for part, found in parts.items()}
    data["window"] = torch.arange(size.context + 1)

    def loss_at(model: nn.Module, part: str, starts: Tensor) -> Tensor:
        tokens = data[part][starts[:, None] + data["window"]].long()
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def score(model: nn.Module, part: str, quick: bool) -> float:
        rounds = min(4, size.rounds) if quick else size.rounds
        count, device = rounds * size.batch_size, data[part].device
        starts = torch.linspace(0, len(data[part]) - size.context - 2, count, device=device).long()
        return torch.stack([loss_at(model, part, some) for some in starts.view(rounds, -1)]).mean().item()

    def begin_model(seed: int) -> nn.Module:
        return GPT(size) if kind == "plain" else begin(GPT(size), size.layers)

    name = f"text-{kind}" if kind else "text"
    return SuiteTask(
        name=name,
        title=name,
        about="nats a token on unseen files of Python source",
        steps=size.steps,
        batch_size=size.batch_size,
        loss_name="validation loss",
        score_name="test loss",
        best_score="least",
        model=begin_model,
        batches=lambda seed, batch: draw_numbers((len(parts["train"]) - size.context - 1) // size.stride, seed, batch),
        loss=lambda model, chosen: loss_at(model, "train", chosen * size.stride),
        evaluate=lambda model: score(model, "validation", False),
        score=score,
        data=data,
        max_grad_norm=1.0,
        decay=0.1,
        fingerprint=digest + (" tiny" if tiny else ""),
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
        nn.Linear(128 * 7 * 7, 256),
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


def load_images(folder: Path) -> dict[str, Tensor]:
    """Fashion-MNIST as torchvision keeps it in a folder, fetched into it where it is not there."""
    from torchvision.datasets import FashionMNIST

    sets = {"train": FashionMNIST(folder, download=True), "test": FashionMNIST(folder, train=False, download=True)}
    images = {f"{part}_images": each.data for part, each in sets.items()}
    return images | {f"{part}_labels": each.targets for part, each in sets.items()}


def images(folder: Path, name: str, batch_size: int, *, tiny: bool = False) -> SuiteTask:
    """Eight epochs of the convnet at any batch size, or sixteen of the transformer."""
    read = load_images(folder)
    shuffled = torch.randperm(len(read["train_labels"]), generator=torch.Generator().manual_seed(0))
    numbers = {"train": shuffled[VALIDATION:], "validation": shuffled[:VALIDATION]}
    pixels = {part: read["train_images"][own] for part, own in numbers.items()} | {"test": read["test_images"]}
    answers = {part: read["train_labels"][own] for part, own in numbers.items()} | {"test": read["test_labels"]}
    if tiny:
        pixels, answers = ({part: found[:600] for part, found in own.items()} for own in (pixels, answers))

    data = {f"{part} images": found for part, found in pixels.items()}
    data |= {f"{part} labels": found.long() for part, found in answers.items()}

    def answer(model: nn.Module, some: Tensor) -> Tensor:
        logits: Tensor = model((some[:, None].float() / 255 - 0.2860) / 0.3530)
        return logits

    def loss(model: nn.Module, chosen: Tensor) -> Tensor:
        return F.cross_entropy(answer(model, data["train images"][chosen]).float(), data["train labels"][chosen])

    def score(model: nn.Module, part: str, quick: bool) -> float:
        some, wanted = data[f"{part} images"], data[f"{part} labels"]
        pairs = zip(some.split(2500), wanted.split(2500), strict=True)
        right = [(answer(model, each).argmax(1) == labels).sum() for each, labels in pairs]
        return torch.stack(right).sum().item() / len(wanted)

    count = len(answers["train"])
    epochs = 8 if name == "fashion" else 16
    return SuiteTask(
        name=f"{name}-{batch_size}",
        title=f"{name}-{batch_size}",
        about="percent of unseen images told right",
        steps=max(epochs * count // batch_size, 2),
        batch_size=batch_size,
        loss_name="validation error",
        score_name="test accuracy",
        model=lambda seed: convnet() if name == "fashion" else begin(ViT(), 6),
        batches=lambda seed, size: draw_numbers(count, seed, size),
        loss=loss,
        evaluate=lambda model: 1 - score(model, "validation", False),
        score=score,
        data=data,
        max_grad_norm=None if name == "fashion" else 1.0,
        decay=0.05,
        fingerprint=hashlib.sha256(read["train_images"].numpy().tobytes()).hexdigest()[:12] + (" tiny" if tiny else ""),
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
        raise CommandError(f"{name} needs --data, a folder for Fashion-MNIST")
    if importlib.util.find_spec("torchvision") is None:
        raise CommandError(f"{name} needs torchvision, which reads Fashion-MNIST: pip install torchvision")


def make_task(name: str, data: Path | None, *, tiny: bool = False) -> SuiteTask:
    """A task by its name: "text", "fashion-512", "vit-1024", with any batch size."""
    check_task(name, data)
    kind, _, batch = name.partition("-")
    if kind == "text":
        return text(batch, data, tiny=tiny)
    assert data is not None
    return images(data, kind, int(batch), tiny=tiny)
