"""Tasks in PyTorch: a module, and a loss to differentiate."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from thalweg.errors import CommandError, OptimError
from thalweg.race.adapters import blamed, leaves, scheduled, torch_optimizer
from thalweg.race.contestants import Contestant, Mixed
from thalweg.race.device import Device
from thalweg.race.rivals import Rival
from thalweg.race.task import Conditions, Measure, Schedule, Task, Training, measured, relative
from thalweg.show import registered


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

    functions: ClassVar[tuple[str, ...]] = ("model", "batches", "loss", "evaluate")

    def start(self, contestant: Contestant, schedule: Schedule, conditions: Conditions) -> Training:
        device = Device(conditions.device)
        import torch

        with device.seeded(conditions.seed, 0):
            model = self.call("model", self.model, conditions.seed)
        if not isinstance(model, torch.nn.Module):
            raise CommandError(f"task {self.name!r}: model must return a torch.nn.Module, got {type(model).__name__}")
        model.to(device.name)
        optimizer = self.optimizer(contestant, model, schedule(1), conditions)
        return ModelTraining(self, model, contestant, optimizer, schedule, conditions, device)

    def optimizer(self, contestant: Contestant, model: Any, lr: float, conditions: Conditions) -> Any:
        if isinstance(contestant, Rival):
            if contestant.kind != "torch":
                raise CommandError(
                    f"task {self.name!r} is in torch, and {contestant.name} is of {contestant.kind}, which races "
                    "only on tasks in numpy: digits, valley, or an ArrayTask of your own"
                )
            return torch_optimizer(contestant, list(model.parameters()), lr, self.name)
        if contestant.name in registered.OWN_MIXTURES:
            return self.own_mixture(contestant, model, lr, conditions)
        try:
            if isinstance(contestant, Mixed):
                make = registered.torch_mixture(contestant.rule)
                options = {"adamw_lr": lr, **contestant.options}
                return make(model, lr, engine=conditions.engine, **options)
            kind = registered.torch_optimizer(contestant.rule)
            return kind(model.named_parameters(), lr=lr, engine=conditions.engine, **contestant.options)
        except ValueError as error:  # ours, and that of torch for a model without parameters
            raise CommandError(f"task {self.name!r}, {contestant.name}: {error}") from None

    def own_mixture(self, contestant: Contestant, model: Any, lr: float, conditions: Conditions) -> Any:
        """What a function of the user's makes for the model."""
        import torch

        make = registered.torch_mixture(contestant.rule)
        engine = {"engine": conditions.engine} if "engine" in inspect.signature(make).parameters else {}
        with blamed(contestant, self.name, f"{contestant.name}(model, lr={lr:g})"):
            found = make(model, lr=lr, **engine, **contestant.options)
        if not isinstance(found, torch.optim.Optimizer):
            raise CommandError(
                f"{contestant.name} returned a {type(found).__name__}: it must return an optimizer of torch"
            )
        return found


class ModelTraining(Training):
    def __init__(
        self,
        task: ModelTask,
        model: Any,
        contestant: Contestant,
        optimizer: Any,
        schedule: Schedule,
        conditions: Conditions,
        device: Device,
    ) -> None:
        self.task, self.model, self.contestant, self.optimizer = task, model, contestant, optimizer
        self.set_rate = scheduled(optimizer, schedule)
        self.device, self.seed, self.steps = device, conditions.seed, 0
        self.batches = task.begun(task.batches, conditions)

    @property
    def foreign(self) -> bool:
        return not hasattr(self.optimizer, "stats")

    def step(self) -> None:
        import torch

        self.steps += 1
        self.set_rate(self.steps)
        batch = self.device.moved(self.task.next_batch(self.batches))
        self.optimizer.zero_grad()
        with self.device.seeded(self.seed, self.steps):  # for dropout and the like
            loss = self.task.call("loss", self.task.loss, self.model, batch)
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                got = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
                raise CommandError(f"task {self.task.name!r}: loss must return a tensor with one element, got {got}")
            self.task.call("the backward pass of loss", loss.backward)
        if self.foreign:
            with blamed(self.contestant, self.task.name, "step()"):
                self.optimizer.step()
            return
        try:
            self.optimizer.step()
        except OptimError as error:
            raise CommandError(f"task {self.task.name!r}: {error}") from None

    def measure(self) -> Measure:
        import torch

        training = self.model.training
        self.model.eval()
        with torch.no_grad():
            found = measured(self.task, self.task.call("evaluate", self.task.evaluate, self.model))
        self.model.train(training)
        return found

    def parameters(self) -> dict[str, Any]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def changes(self, before: Mapping[str, Any]) -> dict[str, float]:
        """Measured where the parameters are: their sizes come over together."""
        import torch

        def rms(x: Any) -> Any:
            return x.double().square().mean().sqrt()

        found = [
            (rms(p.detach().double() - before[name]), rms(before[name])) for name, p in self.model.named_parameters()
        ]
        sizes = torch.stack([size for pair in found for size in pair]).view(-1, 2).tolist()
        return {name: relative(*pair) for name, pair in zip(before, sizes, strict=True)}

    def figures(self) -> Mapping[str, Mapping[str, Any]]:
        found: Mapping[str, Mapping[str, Any]] = {} if self.foreign else self.optimizer.stats()
        return found

    def state_bytes(self) -> int:
        return sum(entry.numel() * entry.element_size() for entry in leaves(dict(self.optimizer.state)))

    def engine(self) -> str:
        return "torch" if self.foreign else str(self.optimizer.engine)

    def begin_measuring(self) -> None:
        self.device.forget_peak()

    def wait(self) -> None:
        self.device.wait()

    def peak_bytes(self) -> int | None:
        return self.device.peak_bytes()
