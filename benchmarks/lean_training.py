"""Does training in few bits end where training in float32 does? A GPT on bytes of Python's source, and a convnet.

    python -m benchmarks.lean_training --tasks text,convnet --data FOLDER --records benchmarks/results/lean_training
    python -m benchmarks.lean_training --records benchmarks/results/lean_training --draw docs/images/lean_training.svg

LAMB trains the same model from the same first weights over the same batches: float32 weights with state in float32 and
in eight bits; and, for the GPT, bfloat16 weights that are rounded to the nearest, at random, or with a record of what
rounding cost. The GPT has two rates: at the smaller one most steps are shorter than half the distance between
neighbours in bfloat16. FOLDER of --data holds the four files of Fashion-MNIST, for the convnet alone. Runs that are
recorded already are not repeated.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim import Optimizer

import thalweg.torch
from benchmarks.training.draw import Field, load_fields, read_curve
from benchmarks.training.tasks import Block, SuiteTask, begin, draw_numbers, images
from thalweg.errors import CommandError
from thalweg.race.contest import race
from thalweg.race.contestants import Contestant
from thalweg.race.run import Record
from thalweg.race.tasks.text import standard_library
from thalweg.race.terminal import progress_bars
from thalweg.show.arguments import split_words
from thalweg.show.console import aside

#: By name: the dtype of the weights, and options of the optimizer.
CONTESTANTS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32 weights, float32 state": (torch.float32, {}),
    "float32 weights, int8 state": (torch.float32, {"state_dtype": "int8"}),
    "bfloat16 weights, nearest": (torch.bfloat16, {}),
    "bfloat16 weights, stochastic": (torch.bfloat16, {"rounding": "stochastic"}),
    "bfloat16 weights, compensated": (torch.bfloat16, {"rounding": "compensated"}),
    "bfloat16 weights, compensated, int8 state": (torch.bfloat16, {"rounding": "compensated", "state_dtype": "int8"}),
}
#: The best of three rates for the GPT, and one as in long training.
RATES = {"text": (0.02, 0.0025), "convnet": (0.01,)}
SYMBOLS, CONVNET_BATCH = 256, 512
#: Bytes of text in all; the last two tenths are for validation and test.


@dataclass(frozen=True)
class Size:
    width: int
    layers: int
    context: int
    batch: int


class ByteGPT(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(SYMBOLS, size.width), nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.width // 32, causal=True) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, SYMBOLS, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.tokens(text) + self.places.weight
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def make_text(size: Size, steps: int, limit: int) -> SuiteTask:
    """limit: bytes of text."""
    everything = standard_library(limit)
    tenth = len(everything) // 10
    parts = dict(zip(("train", "validation", "test"), everything.tensor_split([-2 * tenth, -tenth]), strict=True))

    data = {**parts, "window": torch.arange(size.context + 1)}

    def loss_at(model: nn.Module, part: str, starts: Tensor) -> Tensor:
        tokens = data[part][starts[:, None] + data["window"]].long()
        weights = {name: p.float() for name, p in model.named_parameters()}  # so that all but their rounding is alike
        logits = functional_call(model, weights, (tokens[:, :-1],))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def score(model: nn.Module, part: str, quick: bool) -> float:
        starts = torch.linspace(0, len(data[part]) - size.context - 2, 512, device=data[part].device).long()
        return torch.stack([loss_at(model, part, some) for some in starts.split(128)]).mean().item()

    return SuiteTask(
        name="text",
        title="text",
        about=f"nats a byte on unseen files of Python source; {size.layers} layers of width {size.width}",
        steps=steps,
        batch_size=size.batch,
        loss_name="validation loss",
        score_name="test loss",
        best_score="least",
        model=lambda seed: begin(ByteGPT(size), size.layers),
        batches=lambda seed, batch: draw_numbers(len(parts["train"]) - size.context - 1, seed, batch),
        loss=lambda model, chosen: loss_at(model, "train", chosen),
        evaluate=lambda model: score(model, "validation", False),
        score=score,
        data=data,
        captures=False,  # weights have different dtypes, so that each contestant trains a model of its own
        max_grad_norm=1.0,
        decay=0.1,
        fingerprint=hashlib.sha256(everything.numpy().tobytes()).hexdigest()[:12],
    )


def make_lamb(dtype: torch.dtype, model: nn.Module, *, lr: float, **options: Any) -> Optimizer:
    """LAMB, once the weights have their dtype."""
    return thalweg.torch.LAMB(model.to(dtype).named_parameters(), lr=lr, overrides="standard", **options)


def enter(task: SuiteTask, names: Sequence[str]) -> Iterator[Contestant]:
    """Those who take part: weights of a convnet, which batch norm scales, stay in float32."""
    for name in names:
        dtype, options = CONTESTANTS[name]
        if task.name == "text" or dtype == torch.float32:
            given = {**options, "weight_decay": task.decay}
            yield Contestant(name=name, rule=name, kind="mixture", make=partial(make_lamb, dtype), options=given)


def train_all(task: SuiteTask, names: Sequence[str], device: str, folder: Path, seeds: int) -> None:
    """Run what is not recorded yet: every rate with every seed."""
    contestants, rates = list(enter(task, names)), {"": RATES[task.name]}
    ready = race(task, optimizers=contestants, rates=rates, seeds=seeds, full=True, device=device, folder=folder)
    with progress_bars(aside(), ready) as (on_measure, on_run):
        ready.run(on_measure, on_run)


def list_records(field: Field, lr: float) -> Iterator[tuple[str, list[Record]]]:
    for name in CONTESTANTS:
        if found := [each for each in field.records if (each.run.contestant, each.run.lr) == (name, lr)]:
            yield name, found


def list_rates(field: Field) -> list[float]:
    return list(dict.fromkeys(record.run.lr for record in field.records))


def write_table(field: Field) -> str:
    """At each rate the mean of the seeds on test data, and each of them."""
    rates, parameters = list_rates(field), field.records[0].result.parameters
    course = field.course
    about = f"{course.about}; {parameters:,} parameters, {course.steps} steps of {course.batch_size}"
    device = field.where["machine"].get("gpu", "cpu")
    lines = [
        f"## {course.title}\n\n{about[0].upper()}{about[1:]}; {device}, torch {field.where['versions']['torch']}.\n",
        f"| | bytes a parameter, weights and state | {' | '.join(f'lr {lr:g}' for lr in rates)} |",
        "|---|---:" + "|---" * len(rates) + "|",
    ]
    cells: dict[str, list[str]] = {}
    size = {}
    for lr in rates:
        for name, records in list_records(field, lr):
            scores = [(record.result.score or [None])[-1] for record in records]
            tests = [None if score is None else field.read_score(score) for score in scores]
            known = [test for test in tests if test is not None]
            mean = f"**{statistics.mean(known):.4g}**" if len(known) == len(tests) else "diverged"
            every = ", ".join("-" if test is None else f"{test:.4g}" for test in tests)
            cells.setdefault(name, []).append(f"{mean} ({every})")
            size[name] = CONTESTANTS[name][0].itemsize + records[0].result.state_bytes / parameters
    lines += [f"| {name} | {size[name]:.2f} | {' | '.join(row)} |" for name, row in cells.items()]
    return "\n".join([*lines, ""])


def draw(fields: Sequence[Field], path: Path) -> None:
    """A panel for each task and rate: validation on the way, the mean of the seeds in a band of all of them."""
    from thalweg.show.pictures import figure, quieten, save

    panels = [(field, lr) for field in fields for lr in list_rates(field)]
    picture = figure(5 * len(panels), 4.2)
    for axes, (field, lr) in zip(picture.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        quieten(axes)
        late = []
        for name, records in list_records(field, lr):
            moments = list(zip(*map(read_curve, records), strict=False))
            steps = [moment[0][0] for moment in moments]
            scores = [[field.read_loss(loss) for _, loss in moment] for moment in moments]
            (line,) = axes.plot(steps, [statistics.mean(seen) for seen in scores], label=name)
            axes.fill_between(steps, [*map(min, scores)], [*map(max, scores)], alpha=0.15, color=line.get_color())
            late += [score for seen in scores[len(scores) // 3 :] for score in seen]
        room = (max(late) - min(late)) / 20
        axes.set(xlabel="step", ylim=(min(late) - room, max(late) + room), title=f"{field.course.title}, lr {lr:g}")
        axes.set_ylabel(f"validation: {field.course.about.split(';')[0]}")
        axes.legend(fontsize=7, frameon=False)
    save(picture, path.parent, path.stem, ["svg"])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", default="text", help="text, convnet or both (default: text)")
    parser.add_argument(
        "--contestants", default=";".join(CONTESTANTS), help="names, with ; between them (default: all)"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data", type=Path, help="folder of the four files of Fashion-MNIST, for the convnet")
    parser.add_argument("--records", type=Path, required=True, help="folder where runs are recorded, a folder a task")
    parser.add_argument("--draw", type=Path, help="draw the recorded runs into this SVG file, and run nothing")
    parser.add_argument("--seeds", type=int, default=3, help="first weights and batches (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="default: 1000 of the GPT, eight epochs of the convnet")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=32, help="of the GPT (default: %(default)s)")
    parser.add_argument("--text", type=int, default=8_000_000, help="bytes of text (default: %(default)s)")
    given = parser.parse_args(arguments)
    given.contestants = given.contestants.split(";")
    if unknown := set(given.contestants) - set(CONTESTANTS):
        parser.error(f"--contestants must be among {'; '.join(CONTESTANTS)}, got {'; '.join(sorted(unknown))}")
    given.tasks = split_words(given.tasks, "--tasks")
    if unknown := set(given.tasks) - set(RATES):
        parser.error(f"--tasks must be among {', '.join(RATES)}, got {', '.join(sorted(unknown))}")
    if "convnet" in given.tasks and given.data is None and given.draw is None:
        parser.error("the convnet needs --data, the folder of the four files of Fashion-MNIST")
    return given


def main(arguments: Sequence[str] | None = None) -> None:
    given = parse(arguments)
    try:
        for name in [] if given.draw else given.tasks:
            if name == "text":
                size = Size(given.width, given.layers, given.context, given.batch)
                task = make_text(size, given.steps or 1000, given.text)
            else:
                task = replace(images(given.data, "fashion", CONVNET_BATCH), name=name, title=name)
                task = replace(task, steps=given.steps or task.steps)
            train_all(task, given.contestants, given.device, given.records / name, given.seeds)
        found = sorted(load_fields(given.records).values(), key=lambda field: field.course.title, reverse=True)
    except CommandError as error:
        raise SystemExit(str(error)) from None
    if given.draw:
        draw(found, given.draw)
    sys.stdout.write("\n".join(map(write_table, found)))


if __name__ == "__main__":
    main()
