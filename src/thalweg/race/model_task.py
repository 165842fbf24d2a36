"""Tasks in PyTorch: a module, and a loss to differentiate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from thalweg.errors import CommandError, OptimError
from thalweg.race.adapters import blamed, leaves, scheduled, torch_optimizer
from thalweg.race.contestants import Contestant
from thalweg.race.rivals import Rival
from thalweg.race.task import Array, Conditions, Measure, Schedule, Task, Training, measured
from thalweg.show import registered
from thalweg.show.extras import extra

if TYPE_CHECKING:
    import torch


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
        with extra("torch"):
            import torch

        device = checked_device(conditions.device)
        with seeded(conditions.seed, 0):
            model = self.call("model", self.model, conditions.seed)
        if not isinstance(model, torch.nn.Module):
            raise CommandError(f"task {self.name!r}: model must return a torch.nn.Module, got {type(model).__name__}")
        model.to(device)
        optimizer = self.optimizer(contestant, model, schedule(1), conditions)
        return ModelTraining(self, model, contestant, optimizer, schedule, conditions)

    def optimizer(self, contestant: Contestant, model: Any, lr: float, conditions: Conditions) -> Any:
        if isinstance(contestant, Rival):
            if contestant.kind != "torch":
                raise CommandError(
                    f"task {self.name!r} is in torch, and {contestant.name} is of {contestant.kind}, which races "
                    "only on tasks in numpy: digits, valley, or an ArrayTask of your own"
                )
            return torch_optimizer(contestant, list(model.parameters()), lr, self.name)
        kind = registered.torch_optimizer(contestant.rule)
        try:
            return kind(model.named_parameters(), lr=lr, engine=conditions.engine, **contestant.options)
        except ValueError as error:  # ours, and that of torch for a model without parameters
            raise CommandError(f"task {self.name!r}, {contestant.name}: {error}") from None


class ModelTraining(Training):
    def __init__(
        self,
        task: ModelTask,
        model: Any,
        contestant: Contestant,
        optimizer: Any,
        schedule: Schedule,
        conditions: Conditions,
    ) -> None:
        self.task, self.model, self.contestant, self.optimizer = task, model, contestant, optimizer
        self.set_rate = scheduled(optimizer, schedule)
        self.device, self.seed, self.steps = conditions.device, conditions.seed, 0
        self.batches = task.begun(task.batches, conditions)

    @property
    def foreign(self) -> bool:
        return isinstance(self.contestant, Rival)

    def step(self) -> None:
        import torch

        self.steps += 1
        self.set_rate(self.steps)
        batch = moved(self.task.next_batch(self.batches), self.device)
        self.optimizer.zero_grad()
        with seeded(self.seed, self.steps):  # for dropout and the like
            loss = self.task.call("loss", self.task.loss, self.model, batch)
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                got = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
                raise CommandError(f"task {self.task.name!r}: loss must return a tensor with one element, got {got}")
            self.task.call("the backward pass of loss", loss.backward)
        if isinstance(self.contestant, Rival):
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

    def parameters(self) -> dict[str, Array]:
        return {name: p.detach().cpu().double().numpy().copy() for name, p in self.model.named_parameters()}

    def figures(self) -> Mapping[str, Mapping[str, Any]]:
        found: Mapping[str, Mapping[str, Any]] = {} if self.foreign else self.optimizer.stats()
        return found

    def state_bytes(self) -> int:
        return sum(entry.numel() * entry.element_size() for entry in leaves(dict(self.optimizer.state)))

    def engine(self) -> str:
        return "torch" if self.foreign else str(self.optimizer.engine)

    def wait(self) -> None:
        import torch

        if torch.device(self.device).type == "cuda":
            torch.cuda.synchronize(self.device)


@contextmanager
def seeded(seed: int, step: int) -> Iterator[None]:
    """Random numbers of torch that depend on seed and step; afterwards those of the caller go on as before."""
    import torch

    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed * 1_000_003 + step)
        yield


def checked_device(name: str) -> torch.device:
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        raise CommandError(f"there is no device {name!r}: try cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise CommandError(f"there is no device {name!r}: torch finds no CUDA device here; try cpu")
    return device


def moved(batch: Any, device: str) -> Any:
    """A batch on the device: a tensor, or tuples, lists and dicts of them."""
    if isinstance(batch, (tuple, list)):
        parts = [moved(part, device) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)  # named tuples want them singly
    if isinstance(batch, dict):
        return {key: moved(part, device) for key, part in batch.items()}
    return batch.to(device) if hasattr(batch, "to") else batch
