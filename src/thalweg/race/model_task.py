"""Tasks in PyTorch: a module, and a loss to differentiate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from thalweg.race.contestants import Contestant
from thalweg.race.optimizers import follow_schedule, make_for_model, name_in
from thalweg.race.task import Measure, Run, Task, Training, blame, put_averages
from thalweg.show.devices import Device
from thalweg.show.extras import extra


@dataclass(frozen=True, kw_only=True)
class ModelTask(Task):
    """A task in PyTorch. ``model`` gets a seed; the race itself seeds torch with it first."""

    model: Callable[[int], Any]
    #: Batches of tensors, endlessly, for a seed and a batch size; the race moves them to the device.
    batches: Callable[[int, Any], Iterator[Any]]
    #: The loss of a model on a batch, a tensor with one element.
    loss: Callable[[Any, Any], Any]
    #: The loss, or the loss and a score, of a model; called without gradients and in ``eval`` mode.
    evaluate: Callable[[Any], Any]
    #: The norm of all gradients together that a step may have at most; larger ones are scaled down to it.
    max_grad_norm: float | None = None

    functions: ClassVar[tuple[str, ...]] = ("model", "batches", "loss", "evaluate")

    def start(self, contestant: Contestant, run: Run) -> Training:
        with extra("torch"):
            import torch
        device = Device(run.device)
        with device.seed_torch(run.seed, 0):
            model = self.call("model", self.model, run.seed)
        if not isinstance(model, torch.nn.Module):
            raise self.error(f"model must return a torch.nn.Module, got {type(model).__name__}")
        model = self.place_model(model.to(device.name))
        optimizer = make_for_model(contestant, model, self, run)
        return self.training(self, model, contestant, optimizer, run, device)

    def place_model(self, model: Any) -> Any:
        """The model that is trained: the one given, or another with its weights."""
        return model

    def training(self, *parts: Any) -> ModelTraining:
        return ModelTraining(*parts)


class ModelTraining(Training):
    """A training of a model. What a task trains otherwise, its own subclass says."""

    def __init__(
        self, task: ModelTask, model: Any, contestant: Contestant, optimizer: Any, run: Run, device: Device
    ) -> None:
        self.task, self.model, self.contestant, self.optimizer = task, model, contestant, optimizer
        self.set_rate, self.last = follow_schedule(optimizer, task, run), run.steps
        self.device, self.seed, self.steps = device, run.seed, 0
        self.batches, self.wait = task.begin_batches(task.batches, run), device.wait

    def step(self) -> None:
        self.steps += 1
        self.set_rate(self.steps)
        batch = self.device.move(next(self.batches))
        with self.device.seed_torch(self.seed, self.steps):  # for dropout and the like
            self.compute_gradients(batch)
        self.step_optimizer()

    def compute_gradients(self, batch: Any) -> None:
        import torch

        self.optimizer.zero_grad()
        loss = self.task.call("loss", self.task.loss, self.model, batch)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise self.task.error(f"loss must return a tensor with one element, got {got}")
        self.task.call("the backward pass of loss", loss.backward)

    def step_optimizer(self) -> None:
        import torch

        if self.task.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.task.max_grad_norm)
        with blame(name_in(self.task, self.contestant), "step()"):
            self.optimizer.step()

    def measure(self) -> Measure:
        import torch

        training = self.model.training
        self.model.eval()
        with torch.no_grad(), put_averages(self.optimizer):
            measure = self.task.read_measure(self.task.call("evaluate", self.task.evaluate, self.model))
        self.model.train(training)
        return measure

    def count_parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())
