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
        set_rate, batches = follow_schedule(optimizer, self, run), self.begin_batches(self.batches, run)

        def step(number: int) -> None:
            set_rate(number)
            batch = device.move(next(batches))
            with device.seed_torch(run.seed, number):  # for dropout and the like
                self.compute_gradients(model, batch)
            if self.max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), self.max_grad_norm)
            with blame(name_in(self, contestant), "step()"):
                optimizer.step()

        def measure(number: int) -> Measure:
            training = model.training
            model.eval()
            with torch.no_grad(), put_averages(optimizer):
                measured = self.measure(model, is_over=number == run.steps)
            model.train(training)
            return measured

        return Training(optimizer, step, measure, sum(p.numel() for p in model.parameters()), device.wait)

    # ---- what a task may do otherwise

    def place_model(self, model: Any) -> Any:
        """The model that is trained: the one given, or another with its weights."""
        return model

    def compute_gradients(self, model: Any, batch: Any) -> None:
        import torch

        model.zero_grad()
        loss = self.call("loss", self.loss, model, batch)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise self.error(f"loss must return a tensor with one element, got {got}")
        self.call("the backward pass of loss", loss.backward)

    def measure(self, model: Any, *, is_over: bool) -> Measure:
        return self.read_measure(self.call("evaluate", self.evaluate, model))
