"""Train every contestant on every task, and record each run.

    python -m benchmarks.training.run --device cuda --data FOLDER --records FOLDER --seeds 3

Runs that the records hold already are not run again, so that a search which stopped (--budget-seconds) goes on where it
was. FOLDER of --data holds the four files of Fashion-MNIST (Debian's package dataset-fashion-mnist has them under
/usr/share/datasets/fashion-mnist). On a GPU the forward and backward pass is one graph, compiled for transformers;
optimizers step as users would have them step.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.training import protocol
from benchmarks.training.asked import asked
from benchmarks.training.contestants import CONTESTANTS, Contestant
from benchmarks.training.tasks import Task, check_task, task
from thalweg.errors import CommandError

Loss = Callable[[Tensor], Tensor]
#: How often a run is scored on its way.
POINTS = 16


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


class Trainer:
    """A task's model, trained again and again from other first weights."""

    def __init__(self, own: Task, device: str) -> None:
        self.task, self.device = own, device
        self.model = own.model().to(device)
        self.params = list(self.model.parameters())
        self.chosen = own.order(0)[0].to(device)
        self.replay: Callable[[], None] = partial(self.step_backward, self.loss) if device == "cpu" else self.captured()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.device == "cpu":
            return contextlib.nullcontext()
        return torch.autocast("cuda", torch.bfloat16, cache_enabled=False)

    def loss(self, chosen: Tensor) -> Tensor:
        return self.task.loss(self.model, chosen)

    def captured(self) -> Callable[[], None]:
        """The forward and backward pass as one graph, which writes the gradients anew."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compiled = self.compiled()
            for _ in range(3):
                self.step_backward(compiled)
        torch.cuda.current_stream().wait_stream(stream)
        self.model.zero_grad(set_to_none=True)  # so that the graph owns them
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step_backward(compiled)
        return graph.replay

    def compiled(self) -> Loss:
        if not self.task.compiled:
            return self.loss
        try:
            made = torch.compile(self.loss)
            self.step_backward(made)
        except Exception as error:  # no compiler: slower, and the same
            say(f"{self.task.name}: not compiled: {type(error).__name__}: {error}")
            return self.loss
        return made

    def step_backward(self, loss: Loss) -> None:
        self.model.zero_grad(set_to_none=True)
        with self.autocast():
            value = loss(self.chosen)
        value.backward()

    def begin(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model.load_state_dict(self.task.model().state_dict())

    def score(self, part: str, *, quick: bool = False) -> float:
        self.model.eval()
        with torch.no_grad(), self.autocast():
            score = self.task.score(self.model, part, quick)
        self.model.train()
        return score

    def now(self) -> float:
        if self.device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter()

    def run(self, optimizers: Sequence[Optimizer], seed: int, steps: int) -> protocol.Run:
        """Train with optimizers that were made for this model; stop early if the loss is not finite."""
        order = self.task.order(seed).to(self.device)
        rates = [(group, group["lr"]) for own in optimizers for group in own.param_groups]
        curve, times = [], []
        marks = {steps * point // POINTS for point in range(1, POINTS)}
        last, since = self.now(), 0
        for t in range(1, steps + 1):
            factor = scheduled(t, steps)
            for group, lr in rates:
                group["lr"] = lr * factor
            self.chosen.copy_(order[t - 1])
            self.replay()
            if self.task.clip is not None:
                nn.utils.clip_grad_norm_(self.params, self.task.clip, foreach=True)
            for own in optimizers:
                own.step()
            if t in marks or t == steps:
                times.append((self.now() - last) * 1000 / (t - since))
                score = self.score("validation", quick=t < steps)
                curve.append((t, round(score, 4)))
                if not math.isfinite(score):
                    break
                last, since = self.now(), t
        finite = all(bool(p.isfinite().all()) for p in self.params)
        return {
            "validation": curve[-1][1] if finite and math.isfinite(curve[-1][1]) else None,
            "test": round(self.score("test"), 4) if finite else None,
            "ms": round(statistics.median(times), 4),
            "state_bytes": sum(bytes_of(own.state) for own in optimizers),
            "curve": curve,
        }


def scheduled(t: int, steps: int) -> float:
    """A share of the rate: up over the first twentieth of the steps, then down to 0 in a straight line."""
    warm = max(steps // 20, 1)
    return t / warm if t <= warm else (steps - t + 1) / (steps - warm + 1)


def bytes_of(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(map(bytes_of, value.values()))
    return sum(map(bytes_of, value)) if isinstance(value, (list, tuple)) else 0


def settings_of(optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """The options of every group that is unlike the one before, so that a changed default is another contestant."""
    found: dict[str, Any] = {}
    for own in optimizers:
        for group in own.param_groups:
            kept = {k: v if isinstance(v, (int, float, str)) or v is None else told(v) for k, v in group.items()}
            for left_out in ("params", "param_names", "lr", "initial_lr", "overrides", "step"):
                kept.pop(left_out, None)
            found[str(len(found))] = kept
    return found


def told(value: Any) -> str:
    """What an object says of itself, without its address, which every run would have another of."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def machine(device: str) -> str:
    return "cpu" if device == "cpu" else torch.cuda.get_device_name()


def identity_of(own: Task, trainer: Trainer, device: str) -> dict[str, Any]:
    """What runs must have in common to lie in one file."""
    return {
        "task": own.name,
        "about": own.about,
        "steps": own.steps,
        "batch_size": own.batch_size,
        "higher_is_better": own.higher_is_better,
        "parameters": sum(p.numel() for p in trainer.params),
        "data": own.fingerprint,
        "device": machine(device),
        "torch": torch.__version__,
    }


class Contest:
    """All contestants on one task, until the time is over."""

    def __init__(self, trainer: Trainer, records: protocol.Records, given: argparse.Namespace, until: float) -> None:
        self.trainer, self.records, self.given, self.until = trainer, records, given, until
        self.longest: dict[str, float] = {}

    def hold(self, chosen: Iterable[str]) -> None:
        failed = set()
        for trials, name in itertools.product(self.given.trials, chosen):
            seeds = self.given.seeds if trials == self.given.trials[-1] else 1
            try:
                if name not in failed:
                    self.enter(name, CONTESTANTS[name], trials, seeds)
            except TimeoutError:
                raise TimeoutError(name) from None
            except Exception as error:  # the others go on
                failed.add(name)
                say(f"{self.trainer.task.name}: {name} failed: {type(error).__name__}: {error}")

    def enter(self, name: str, contestant: Contestant, trials: int, seeds: int) -> None:
        own = self.trainer.task
        higher = own.higher_is_better
        middle = contestant.text if own.name.startswith("text") else contestant.images
        settings = settings_of(contestant.make(self.trainer.model, middle, own.decay))
        while True:
            runs = self.records.of(name, settings)
            tried = {run["lr"]: protocol.loss_of(run, higher) for run in runs if run["seed"] == 0}
            best = min(tried, key=lambda rate: tried[rate], default=None)
            beyond = self.given.beyond if best is not None and protocol.at_edge(best, tried) else 0
            if len(tried) < trials + beyond:
                self.run(name, contestant, settings, protocol.next_rate(tried, middle), 0)
                continue
            done = {(run["lr"], run["seed"]) for run in runs}
            finals = itertools.product(protocol.finalists(runs, higher), range(seeds))
            if not (left := [final for final in finals if final not in done]):
                return
            self.run(name, contestant, settings, *left[0])

    def run(self, name: str, contestant: Contestant, settings: dict[str, Any], lr: float, seed: int) -> None:
        if time.monotonic() + self.longest.get(name, 0.0) > self.until:
            raise TimeoutError
        began = time.monotonic()
        self.trainer.begin(seed)
        optimizers = contestant.make(self.trainer.model, lr, self.trainer.task.decay)
        head = {"contestant": name, "package": contestant.package, "lr": lr, "seed": seed}
        run = head | self.trainer.run(optimizers, seed, self.trainer.task.steps)
        self.records.add(run | {"alone": not self.given.shared, "settings": settings})
        self.longest[name] = time.monotonic() - began
        say(
            f"{self.trainer.task.name:13} {name:40} lr {lr:<8g} seed {seed}  validation {run['validation']}  "
            f"test {run['test']}  {run['ms']:.2f} ms a step  {self.longest[name]:.1f} s"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    until = time.monotonic()
    given = asked(arguments)
    until += given.budget_seconds
    try:
        for name in given.tasks:  # all of them before the first one trains, which may take an hour
            check_task(name, given.data)
        protocol.check_folder(given.records)
        for name in given.tasks:
            hold(name, given, until)
    except TimeoutError as error:
        say(str(error))
    except CommandError as error:
        raise SystemExit(str(error)) from None
    except KeyboardInterrupt:
        say(f"stopped: finished runs are kept in {given.records}, and the same command goes on from there")
        raise SystemExit(130) from None


def hold(name: str, given: argparse.Namespace, until: float) -> None:
    """Let everyone train on one task."""
    began = time.monotonic()
    own = task(name, given.device, given.data, tiny=given.tiny)
    own.steps = given.steps or own.steps
    trainer = Trainer(own, given.device)
    records = protocol.Records(given.records / f"{name}.json", identity_of(own, trainer, given.device))
    for folder in (given.resume, given.records):  # the earlier runs first: the last settings of a name count
        if folder is not None:
            records.load(folder / f"{name}.json")
    say(f"{name}: {records.identity['parameters']:,} parameters, ready after {time.monotonic() - began:.0f} s")
    try:
        Contest(trainer, records, given, until).hold(given.chosen)
    except TimeoutError as error:
        raise TimeoutError(f"{name}: the time is over, {error} is not finished") from None


if __name__ == "__main__":
    main()
