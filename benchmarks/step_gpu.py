"""The time of one optimizer step on a GPU, beside every peer that is installed.

    python benchmarks/step_gpu.py --out report/step_gpu

A thin call of ``thalweg bench --device cuda``, which says what the columns mean (docs/bench.md): all models of
benchmarks/results/step_gpu.md by default, one table for each rule and model, then everything as JSON and a picture.

    python benchmarks/step_gpu.py --lean --models gpt2,llama-1b

Instead: bfloat16 parameters with state in float32, 16 bits and eight, as CUDA graphs, beside the bytes that must move.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thalweg.bench import bench, markdown, process
from thalweg.bench.bandwidth import yardstick
from thalweg.bench.devices import Device, device_called
from thalweg.bench.workload import Workload
from thalweg.errors import CommandError
from thalweg.plan.costs import bytes_moved
from thalweg.plan.sources import resolve
from thalweg.rules import RULES
from thalweg.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor

MODELS, COMPARED = "gpt2,bert-large,resnet50,llama-1b", "lamb,lars,adafactor"
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


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=names, default=names(MODELS), help=f"default: {MODELS}")
    parser.add_argument("--rules", type=names, default=names(COMPARED), help=f"default: {COMPARED}; kron takes longest")
    parser.add_argument("--dtype", default="float32", help="of parameters and gradients (default: %(default)s)")
    parser.add_argument("--against", type=names, help="packages to compare with (default: all that are installed)")
    parser.add_argument("--repeats", type=int, default=7, help="rounds that count (default: %(default)s)")
    parser.add_argument("--lean", action="store_true", help="thalweg's LAMB and AdamW with state in fewer bits, alone")
    parser.add_argument("--out", type=Path, help="folder for bench.json, bench.md and the picture")
    return parser.parse_args(arguments)


def lean_tables(models: Sequence[str], repeats: int) -> Iterator[str]:
    """For each model and way to keep state: the time of a step, beside float32 state and beside the floor."""
    device = device_called("cuda")
    import torch

    import thalweg.torch

    speed = max(yardstick(device).update() for _ in range(repeats))
    for model in models:
        workload = Workload(resolve(model, "bfloat16"), device, "bfloat16")
        params = [torch.nn.Parameter(p) for p in workload.torch_params()]
        for p, g in zip(params, workload.torch_grads, strict=True):
            p.grad = g
        lines = [f"## {model}, bfloat16 parameters; {speed / 1e12:.2f} TB/s", ""]
        lines.append("| | bytes a parameter | ms | times as fast as float32 state | share of the floor |")
        lines.append("|---|---:|---:|---:|---:|")
        for rule in ("LAMB", "AdamW"):
            base = 0.0
            for options in LEAN:
                setting = Settings(RULES[rule], {**OPTIONS, **options}).base
                moved = sum(bytes_moved(setting, tensor) for tensor in workload.model.tensors)
                seconds = captured_seconds(getattr(thalweg.torch, rule), params, options, repeats, device)
                base = base or seconds
                told = ", ".join([rule, *(f"{name}={value}" for name, value in options.items())])
                numbers = f"{moved / workload.model.parameters:.1f} | {seconds * 1e3:.3f} | {base / seconds:.2f}"
                lines.append(f"| {told} | {numbers} | {moved / speed / seconds:.0%} |")
        yield "\n".join(lines)


def captured_seconds(
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
    return statistics.median(device.timed(replay) for _ in range(repeats)) / REPLAYS


def main(arguments: Sequence[str] | None = None) -> None:
    given = parsed(arguments)
    process.prepare("cuda", None)
    try:
        if given.lean:
            for table in lean_tables(given.models, given.repeats):
                say(table)
            return
        found = bench(
            given.models,
            rules=given.rules,
            device="cuda",
            dtype=given.dtype,
            against=given.against,
            repeats=given.repeats,
            on_comparison=lambda comparison: say(markdown.table(comparison)),
        )
    except CommandError as error:
        sys.exit(f"step_gpu.py: {error}")
    found.command = shlex.join(
        ["python", "benchmarks/step_gpu.py", *(sys.argv[1:] if arguments is None else arguments)]
    )
    say(markdown.heading(found))
    if given.out is not None:
        from thalweg.bench import files  # which draws, with matplotlib

        files.write(found, given.out)


if __name__ == "__main__":
    main()
