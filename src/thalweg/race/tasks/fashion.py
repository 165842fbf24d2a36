"""Fashion-MNIST (Xiao, Rasul, Vollgraf 2017, arXiv:1708.07747) from the user's own files, and a small convnet."""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from thalweg.errors import CommandError
from thalweg.race.array_task import shuffle_batches
from thalweg.race.contestants import LARGE_RATES, RATES
from thalweg.race.model_task import ModelTask
from thalweg.race.task import Array
from thalweg.show.devices import Device
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
#: How much larger than its file the content of a gzipped one may be.
MOST_UNPACKED = 64
#: Images whose training loss is measured, and images that are tested, on a CPU: enough, and quick.
SAMPLE = 2000
#: On a GPU, the share of the training images that choose the learning rate and are not trained on.
UNSEEN = 1 / 12
EPOCHS = 8


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
    most = MOST_UNPACKED * path.stat().st_size
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read(most)
            if file.read(1):
                raise CommandError(f"{path} is damaged: it would unpack to more than {most:,} bytes")
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
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


def large_network(side: tuple[int, int]) -> nn.Module:
    def convolution(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    height, width = (n // 4 for n in side)
    return nn.Sequential(
        *convolution(1, 32),
        nn.MaxPool2d(2),
        *convolution(32, 64),
        *convolution(64, 128),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128 * height * width, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


def task(folder: Path, device: str = "cpu", *, large: bool | None = None) -> ModelTask:
    """The task in the size for a device."""
    place = Device(device)
    large = place.kind == "cuda" if large is None else large
    read = load(folder)
    data = {key: torch.from_numpy(array.copy()).to(device) for key, array in read.items()}
    everything = len(read["train_labels"])
    count = everything - int(UNSEEN * everything) if large else everything
    sample = slice(count, None) if large else slice(SAMPLE)
    tested = slice(None) if large else slice(SAMPLE)

    def images(part: str, chosen: Any) -> Tensor:
        return data[f"{part}_images"][chosen].float()[:, None] / 255

    def labels(part: str, chosen: Any) -> Tensor:
        return data[f"{part}_labels"][chosen].long()

    def batches(seed: int, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        for numbers in shuffle_batches(count, seed, batch_size):
            chosen = torch.from_numpy(numbers).to(device)
            yield images("train", chosen), labels("train", chosen)

    def logits(model: nn.Module, some: Tensor) -> Tensor:
        with place.mixed_precision():
            found: Tensor = model(some)
        return found.float()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(logits(model, batch[0]), batch[1])

    def evaluate(model: nn.Module) -> tuple[float, float]:
        right = logits(model, images("test", tested)).argmax(1) == labels("test", tested)
        return loss(model, (images("train", sample), labels("train", sample))).item(), right.float().mean().item()

    side = read["train_images"].shape[1:]
    return ModelTask(
        name="fashion",
        title="Fashion-MNIST",
        about=f"A {'' if large else 'small '}convolutional network learns {count:,} pictures of clothes.",
        model=lambda seed: large_network(side) if large else network(side),
        batches=batches,
        loss=loss,
        evaluate=evaluate,
        steps=max(EPOCHS * count // 512, 1) if large else 300,
        batch_size=512 if large else 128,
        seeds=1,
        target=0.25 if large else 0.5,
        loss_name="validation loss" if large else "training loss",
        score_name="test accuracy",
        rates=LARGE_RATES if large else RATES,
        fingerprint=digest(*(array.tobytes() for array in read.values()), b"large" if large else b""),
    )
