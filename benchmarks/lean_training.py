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
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import thalweg.torch
from benchmarks.training.asked import names
from benchmarks.training.protocol import Records, Run
from benchmarks.training.run import Trainer, identity_of, say, settings_of
from benchmarks.training.tasks import Block, Task, begin, images
from thalweg.race.tasks.text import standard_library

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
TEXT_BYTES = 8_000_000


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


def text(device: str, size: Size, steps: int) -> Task:
    everything = standard_library(TEXT_BYTES)
    tenth = len(everything) // 10
    parts = dict(zip(("train", "validation", "test"), everything.tensor_split([-2 * tenth, -tenth]), strict=True))
    data = {part: found.to(device) for part, found in parts.items()}
    window = torch.arange(size.context + 1, device=device)

    def loss_at(model: nn.Module, part: str, starts: Tensor) -> Tensor:
        tokens = data[part][starts[:, None] + window].long()
        weights = {name: p.float() for name, p in model.named_parameters()}  # so that all but their rounding is alike
        logits = functional_call(model, weights, (tokens[:, :-1],))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def score(model: nn.Module, part: str, quick: bool) -> float:
        starts = torch.linspace(0, len(data[part]) - size.context - 2, 512, device=device).long()
        return torch.stack([loss_at(model, part, some) for some in starts.split(128)]).mean().item()

    return Task(
        name="text",
        about=f"nats a byte on unseen files of Python source; {size.layers} layers of width {size.width}",
        steps=steps,
        batch_size=size.batch,
        choices=len(data["train"]) - size.context - 1,
        epochs=False,
        model=lambda: begin(ByteGPT(size), size.layers),
        loss=lambda model, chosen: loss_at(model, "train", chosen),
        score=score,
        higher_is_better=False,
        clip=1.0,
        decay=0.1,
        fingerprint=hashlib.sha256(everything.numpy().tobytes()).hexdigest()[:12],
    )


def entered(task: str) -> list[str]:
    """Those who take part: weights of a convnet, which batch norm scales, stay in float32."""
    return [name for name, (dtype, _) in CONTESTANTS.items() if task == "text" or dtype == torch.float32]


def train_all(own: Task, records: Records, trainers: Mapping[torch.dtype, Trainer], seeds: int) -> None:
    """Run what is not recorded yet."""
    for seed in range(seeds):
        for lr in RATES[own.name]:
            for name in entered(own.name):
                dtype, options = CONTESTANTS[name]
                trainer = trainers[dtype]
                settings = {"lr": lr, "weight_decay": own.decay, "overrides": "standard", **options}
                optimizer = thalweg.torch.LAMB(trainer.model.named_parameters(), **settings)
                told = settings_of([optimizer])
                if any((run["lr"], run["seed"]) == (lr, seed) for run in records.of(name, told)):
                    continue
                trainer.begin(seed)
                run = {"contestant": name, "lr": lr, "seed": seed, "settings": told, "alone": True}
                run |= trainer.run([optimizer], seed, own.steps)
                records.add(run)
                say(f"{own.name}, {name}, lr {lr:g}, seed {seed}: test {run['test']}, {run['ms']:.2f} ms a step")


def by_name(record: Mapping[str, Any], lr: float) -> Iterator[tuple[str, list[Run]]]:
    for name in CONTESTANTS:
        if runs := [run for run in record["runs"] if run["contestant"] == name and run["lr"] == lr]:
            yield name, runs


def rates_of(record: Mapping[str, Any]) -> list[float]:
    return list(dict.fromkeys(run["lr"] for run in record["runs"]))


def table(record: Mapping[str, Any]) -> str:
    """At each rate the mean of the seeds on test data, and each of them."""
    rates = rates_of(record)
    about = f"{record['about']}; {record['parameters']:,} parameters, {record['steps']} steps of {record['batch_size']}"
    lines = [
        f"## {record['task']}\n\n{about[0].upper()}{about[1:]}; {record['device']}, torch {record['torch']}.\n",
        f"| | bytes a parameter, weights and state | {' | '.join(f'lr {lr:g}' for lr in rates)} |",
        "|---|---:" + "|---" * len(rates) + "|",
    ]
    cells: dict[str, list[str]] = {}
    size = {}
    for lr in rates:
        for name, runs in by_name(record, lr):
            tests = [run["test"] for run in runs]
            known = [test for test in tests if test is not None]
            mean = f"**{statistics.mean(known):.4g}**" if len(known) == len(tests) else "diverged"
            shown = ", ".join("-" if test is None else f"{test:.4g}" for test in tests)
            cells.setdefault(name, []).append(f"{mean} ({shown})")
            size[name] = CONTESTANTS[name][0].itemsize + runs[0]["state_bytes"] / record["parameters"]
    lines += [f"| {name} | {size[name]:.2f} | {' | '.join(row)} |" for name, row in cells.items()]
    return "\n".join([*lines, ""])


def draw(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A panel for each task and rate: validation on the way, the mean of the seeds in a band of all of them."""
    from thalweg.show.pictures import figure, quieten, save

    panels = [(record, lr) for record in records for lr in rates_of(record)]
    picture = figure(5 * len(panels), 4.2)
    for axes, (record, lr) in zip(picture.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        quieten(axes)
        late = []
        for name, runs in by_name(record, lr):
            moments = list(zip(*(run["curve"] for run in runs), strict=False))
            steps = [moment[0][0] for moment in moments]
            scores = [[score for _, score in moment] for moment in moments]
            (line,) = axes.plot(steps, [statistics.mean(seen) for seen in scores], label=name)
            axes.fill_between(steps, [*map(min, scores)], [*map(max, scores)], alpha=0.15, color=line.get_color())
            late += [score for seen in scores[len(scores) // 3 :] for score in seen]
        room = (max(late) - min(late)) / 20
        axes.set(xlabel="step", ylim=(min(late) - room, max(late) + room), title=f"{record['task']}, lr {lr:g}")
        axes.set_ylabel(f"validation: {record['about'].split(';')[0]}")
        axes.legend(fontsize=7, frameon=False)
    save(picture, path.parent, path.stem, ["svg"])


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", type=names, default=["text"], help="text, convnet or both (default: text)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data", type=Path, help="folder of the four files of Fashion-MNIST, for the convnet")
    parser.add_argument("--records", type=Path, required=True, help="folder where runs are recorded, a file a task")
    parser.add_argument("--draw", type=Path, help="draw the recorded runs into this SVG file, and run nothing")
    parser.add_argument("--seeds", type=int, default=3, help="first weights and batches (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="default: 1000 of the GPT, eight epochs of the convnet")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=32, help="of the GPT (default: %(default)s)")
    given = parser.parse_args(arguments)
    if unknown := set(given.tasks) - set(RATES):
        parser.error(f"--tasks must be among {', '.join(RATES)}, got {', '.join(sorted(unknown))}")
    if "convnet" in given.tasks and given.data is None and given.draw is None:
        parser.error("the convnet needs --data, the folder of the four files of Fashion-MNIST")
    return given


def main(arguments: Sequence[str] | None = None) -> None:
    given = parsed(arguments)
    for name in [] if given.draw else given.tasks:
        if name == "text":
            size = Size(given.width, given.layers, given.context, given.batch)
            own = text(given.device, size, given.steps or 1000)
        else:
            own = replace(images(given.device, given.data, "fashion", CONVNET_BATCH), name=name)
            own.steps = given.steps or own.steps
        dtypes = {CONTESTANTS[each][0] for each in entered(name)}
        trainers = {dtype: Trainer(in_dtype(own, dtype), given.device) for dtype in dtypes}
        records = Records(given.records / f"{name}.json", identity_of(own, trainers[torch.float32], given.device))
        records.load(records.path)
        train_all(own, records, trainers, given.seeds)
    found = [json.loads(path.read_text()) for path in sorted(given.records.glob("*.json"), reverse=True)]
    if given.draw:
        draw(found, given.draw)
    sys.stdout.write("\n".join(map(table, found)))


def in_dtype(own: Task, dtype: torch.dtype) -> Task:
    return replace(own, model=lambda: own.model().to(dtype))


if __name__ == "__main__":
    main()
