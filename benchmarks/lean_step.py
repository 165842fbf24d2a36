"""The time of one optimizer step on a GPU with state in float32, 16 bits and eight, beside the bytes that must move.

    python benchmarks/lean_step.py --models gpt2,llama-1b

Parameters are bfloat16, steps are replayed as CUDA graphs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from thalweg.bench.bandwidth import make_yardstick
from thalweg.bench.workload import Workload
from thalweg.errors import CommandError
from thalweg.plan.costs import bytes_moved
from thalweg.plan.sources import resolve
from thalweg.rules import RULES
from thalweg.settings import Settings
from thalweg.show.devices import Device

if TYPE_CHECKING:
    from torch import Tensor

MODELS = "gpt2,bert-large,resnet50,llama-1b"
OPTIONS: dict[str, Any] = dict(weight_decay=0.01)
#: Ways to keep state: the first is what the others are compared with.
LEAN: Sequence[Mapping[str, str]] = (
    dict(state_dtype="float32"),
    dict(state_dtype="bfloat16"),
    dict(state_dtype="bfloat16", state_rounding="stochastic"),
    dict(state_dtype="int8"),
    dict(state_dtype="int8", rounding="compensated"),
)
REPLAYS = 10


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n\n")
    sys.stdout.flush()


def names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=names, default=names(MODELS), help=f"default: {MODELS}")
    parser.add_argument(
        "--repeats", type=int, default=7, help="measurements, whose median counts (default: %(default)s)"
    )
    return parser.parse_args(arguments)


def make_tables(models: Sequence[str], repeats: int) -> Iterator[str]:
    """For each model and way to keep state: the time of a step, beside float32 state and beside the floor."""
    device = Device("cuda")
    import torch

    import thalweg.torch

    yardstick = make_yardstick(device)
    speed = max(yardstick.measure() for _ in range(repeats))
    for model in models:
        workload = Workload(resolve(model, "bfloat16"), device, "bfloat16")
        params = [torch.nn.Parameter(p) for p in workload.params("torch")]
        for p, g in zip(params, workload.grads("torch")[0], strict=True):
            p.grad = g
        lines = [f"## {model}, bfloat16 parameters; {speed / 1e12:.2f} TB/s", ""]
        lines.append("| | bytes a parameter | ms | times as fast as float32 state | share of the floor |")
        lines.append("|---|---:|---:|---:|---:|")
        for rule in ("LAMB", "AdamW"):
            base = 0.0
            for options in LEAN:
                setting = Settings(RULES[rule], {**OPTIONS, **options}).base
                moved = sum(bytes_moved(setting, tensor) for tensor in workload.model.tensors)
                seconds = time_captured(getattr(thalweg.torch, rule), params, options, repeats, device)
                base = base or seconds
                told = ", ".join([rule, *(f"{name}={value}" for name, value in options.items())])
                numbers = f"{moved / workload.model.parameters:.1f} | {seconds * 1e3:.3f} | {base / seconds:.2f}"
                lines.append(f"| {told} | {numbers} | {moved / speed / seconds:.0%} |")
        yield "\n".join(lines)


def time_captured(
    make: Callable[..., Any], params: Sequence[Tensor], options: Mapping[str, str], repeats: int, device: Device
) -> float:
    """Of one step: ten replays in a row, the median of several such rows."""
    import torch

    optimizer = make(params, lr=1e-3, engine="fused", capturable=True, **OPTIONS, **options)
    beside, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(2):  # which make state and kernels
            optimizer.step()
    torch.cuda.current_stream().wait_stream(beside)
    with torch.cuda.graph(graph):
        optimizer.step()

    def replay() -> None:
        for _ in range(REPLAYS):
            graph.replay()

    replay()
    return statistics.median(device.time(replay) for _ in range(repeats)) / REPLAYS


def main(arguments: Sequence[str] | None = None) -> None:
    given = parse(arguments)
    try:
        for table in make_tables(given.models, given.repeats):
            say(table)
    except CommandError as error:
        sys.exit(f"lean_step.py: {error}")


if __name__ == "__main__":
    main()
