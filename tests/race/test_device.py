"""Where tasks in torch run: a GPU is asked for its memory and waited for, and gets tasks that are worth its time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from race_files import write_clothes

from thalweg.race.contest import race
from thalweg.race.contestants import CONTESTANTS
from thalweg.race.model_task import ModelTask, ModelTraining
from thalweg.race.tasks import fashion, text
from thalweg.show.devices import Device


class Card:
    """What torch.cuda tells of a GPU that is not there."""

    def __init__(self) -> None:
        self.allocated, self.peak, self.waited = 100, 100, 0

    def is_available(self) -> bool:
        return True

    def memory_allocated(self, device: str) -> int:
        return self.allocated

    def reset_peak_memory_stats(self, device: str) -> None:
        self.peak = self.allocated

    def max_memory_allocated(self, device: str) -> int:
        return self.peak

    def synchronize(self, device: str) -> None:
        self.waited += 1

    def get_device_name(self, device: str) -> str:
        return "Imaginary 9000"


def test_memory_of_a_gpu_is_counted_from_the_start_of_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card()
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    task = ModelTask(name="line", model=lambda seed: model, batches=lambda *_: iter([]), loss=max, evaluate=max)
    run = race(task, optimizers=["SGD"]).wanted[0]
    monkeypatch.setattr(torch, "cuda", card)
    device = Device("cuda")
    training = ModelTraining(task, model, CONTESTANTS["SGD"], optimizer, run, device, device.count_bytes_in_use())
    card.allocated = card.peak = 170
    training.device.forget_peak()
    card.peak = 400
    assert training.peak_bytes() == 300
    training.device.forget_peak()
    assert training.peak_bytes() == 70
    training.device.wait()
    assert card.waited == 1
    assert device.describe() == "Imaginary 9000"


def test_a_cpu_is_not_waited_for_and_tells_no_memory() -> None:
    device = Device("cpu")
    device.wait()
    device.forget_peak()
    assert device.peak_bytes() is None
    with device.mixed_precision():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


TINY = replace(
    text.LARGE, width=16, heads=2, layers=1, context=8, train_bytes=4000, test_bytes=160, steps=4, batch_size=4
)


@pytest.mark.nightly
def test_the_largest_peak_of_a_run_is_recorded_without_the_copy_that_is_compared_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ModelTraining, "peak_bytes", lambda training: 10 * training.steps)
    (record,) = race(text.task(size=TINY), optimizers=["SGD"], rates={"": [0.01]}, steps=50).run().records.values()
    assert record.result.peak_bytes == 10 * 49


@pytest.mark.nightly
def test_the_large_text_measures_text_that_it_is_not_trained_on() -> None:
    task = text.task(size=TINY)
    assert task.loss_name == "validation loss, nats a byte"
    whole = text.standard_library(4000 + 2 * 160)
    seen = torch.cat([next(task.batches(seed, 4)).flatten() for seed in range(50)])
    assert set(seen.tolist()) <= set(whole[:4000].tolist())
    (course,) = race(task, optimizers=["AdamW"], rates={"": [0.01]}, steps=30).run().summary["courses"]
    assert course["results"][0]["loss"] < course["results"][0]["curve"]["loss"][0]
    assert task.fingerprint != text.task(size=replace(TINY, layers=2)).fingerprint


@pytest.mark.nightly
def test_the_large_fashion_learns_and_keeps_a_twelfth_of_its_images_back(tmp_path: Path) -> None:
    write_clothes(tmp_path, train=48, test=20)
    task = fashion.task(tmp_path, large=True)
    assert "learns 44 pictures" in task.about
    assert task.fingerprint != fashion.task(tmp_path).fingerprint
    outcome = race(task, optimizers=["LAMB"], rates={"": [0.03]}, batch_sizes=[8], steps=1).run()
    (course,) = outcome.summary["courses"]
    assert course["loss_name"] == "validation loss"
    assert course["results"][0]["loss"] < course["results"][0]["curve"]["loss"][0]
