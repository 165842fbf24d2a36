"""Fashion-MNIST (Xiao, Rasul, Vollgraf 2017, arXiv:1708.07747) from the user's own files, and a small convnet."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from thalweg.errors import CommandError
from thalweg.race.array_task import shuffled
from thalweg.race.model_task import ModelTask
from thalweg.race.task import Array
from thalweg.show.extras import extra
from thalweg.show.modules import digest

with extra("torch"):
    import torch
    from torch import Tensor, nn
    from torch.nn import functional as F

#: (name of the file, number of axes): the four files as they are published, gzipped or not.
FILES = {
    "train_images": ("train-images-idx3-ubyte", 3),
    "train_labels": ("train-labels-idx1-ubyte", 1),
    "test_images": ("t10k-images-idx3-ubyte", 3),
    "test_labels": ("t10k-labels-idx1-ubyte", 1),
}
#: Images whose training loss is measured, and images that are tested: enough, and quick.
SAMPLE = 2000


def load(folder: Path) -> dict[str, Array]:
    """Images and labels, checked to belong together."""
    found = {key: read_idx(find(folder, name), axes) for key, (name, axes) in FILES.items()}
    for part in ("train", "test"):
        images, labels = found[f"{part}_images"], found[f"{part}_labels"]
        if len(images) != len(labels) or not len(images):
            raise CommandError(
                f"{folder}: {len(images)} {part} images and {len(labels)} labels: the numbers must be equal"
            )
        if labels.max() > 9 or min(images.shape[1:]) < 8:
            raise CommandError(f"{folder}: {part} labels must be 0 to 9, and images 8 x 8 or larger")
    return found


def find(folder: Path, name: str) -> Path:
    if not folder.is_dir():
        raise CommandError(
            f"{folder} is not a folder: --data must be the folder of the four files of Fashion-MNIST, such as {name}"
        )
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise CommandError(f"{folder} holds neither {name} nor {name}.gz: --data needs the four files of Fashion-MNIST")


def read_idx(path: Path, axes: int) -> Array:
    """An array of bytes in IDX format: two zeros, 8 for bytes, the number of axes, their sizes, the bytes."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError) as error:
        raise CommandError(f"{path} is damaged: {error}") from None
    if content[:4] != bytes((0, 0, 8, axes)) or len(content) < 4 + 4 * axes:
        raise CommandError(f"{path} is not an IDX file of bytes with {axes} axes")
    shape = struct.unpack(f">{axes}I", content[4 : 4 + 4 * axes])
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * axes)
    if values.size != np.prod(shape, dtype=object):
        raise CommandError(f"{path} is damaged: its shape is {shape}, and {values.size:,} bytes follow")
    return values.reshape(shape)


def network(side: tuple[int, int]) -> nn.Module:
    height, width = (-(-n // 4) for n in side)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * height * width, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def task(folder: Path) -> ModelTask:
    data = load(folder)

    def images(part: str, chosen: Any = slice(None)) -> Tensor:
        return torch.from_numpy(data[f"{part}_images"][chosen].astype(np.float32) / 255)[:, None]

    def labels(part: str, chosen: Any = slice(None)) -> Tensor:
        return torch.from_numpy(data[f"{part}_labels"][chosen].astype(np.int64))

    def batches(seed: int, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        for chosen in shuffled(len(data["train_labels"]), seed, batch_size):
            yield images("train", chosen), labels("train", chosen)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def evaluate(model: nn.Module) -> tuple[float, float]:
        device, some = next(model.parameters()).device, slice(SAMPLE)
        training = F.cross_entropy(model(images("train", some).to(device)), labels("train", some).to(device))
        guesses = model(images("test", some).to(device)).argmax(1).cpu()
        return training.item(), (guesses == labels("test", some)).float().mean().item()

    return ModelTask(
        name="fashion",
        title="Fashion-MNIST",
        about=f"A small convolutional network learns {len(data['train_labels']):,} pictures of clothes.",
        model=lambda seed: network(data["train_images"].shape[1:]),
        batches=batches,
        loss=loss,
        evaluate=evaluate,
        steps=300,
        batch_size=128,
        seeds=1,
        target=0.5,
        score_name="test accuracy",
        fingerprint=digest(*(array.tobytes() for array in data.values())),
    )
