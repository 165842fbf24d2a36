"""How much of the messages between owners the work on whole tensors hides, on one GPU.

    python -m benchmarks.overlap --record benchmarks/results/overlap.json
    python -m benchmarks.overlap --record benchmarks/results/overlap.json --draw docs/images/overlap.svg

Two gloo processes share the GPU and step the matrices of a GPT, sharded or replicated, and the first one compares what
it has with an unsharded step. It also records what arrives. Then the second one rests, and the first one repeats its
steps with copies that stand for messages: what leaves is copied to the host's memory, what arrives comes from there,
on streams of their own, at the rate of the bus, about that of a network card of 400 Gb/s. So the GPU has the products
of one rank of two, and the messages with their numbers, which are compared again. torch's profiler records one step.

    host        ms from the call of step() to its return, the GPU being idle before; unsharded, and sharded
    kernels     ms in which a kernel ran, most of them products; messages: a copy that stands for one
    hidden      the share of the time of messages in which a kernel ran
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

import thalweg.torch
from thalweg.torch.sharding import collectives

#: By name: the rule, its options, and whether parameters are sharded or replicated.
RUNS: dict[str, tuple[str, dict[str, Any], str]] = {
    "Muon, shards": ("Muon", {}, "shards"),
    "Muon, replicas": ("Muon", {"divide_work": True}, "replicas"),
    "Kron, shards": ("Kron", {"precond_update_probability": 1.0}, "shards"),
    "Kron, replicas": ("Kron", {"precond_update_probability": 1.0, "divide_work": True}, "replicas"),
}
PORT, STEPS, REPEATS = 29513, 2, 9
#: Steps before those that are measured.
WARM = 3

Span = tuple[float, float]


def shapes_of(layers: int, width: int) -> dict[str, tuple[int, int]]:
    parts = {"qkv": (3 * width, width), "out": (width, width), "up": (4 * width, width), "down": (width, 4 * width)}
    return {f"{layer}.{name}": shape for layer in range(layers) for name, shape in parts.items()}


class Model:
    """Parameters with gradients that do not change, and their optimizer; whole, or what this rank has of them."""

    def __init__(self, run: str, shapes: dict[str, tuple[int, int]], *, whole: bool) -> None:
        rule, options, layout = RUNS[run]
        draw = torch.Generator("cuda").manual_seed(0)
        self.params: dict[str, Any] = {}
        for name, shape in shapes.items():
            p, g = (torch.randn(shape, generator=draw, device="cuda") / 32 for _ in range(2))
            sharded = layout == "shards" and not whole
            self.params[name] = torch.nn.Parameter(place(p) if sharded else p)
            self.params[name].grad = place(g) if sharded else g
        how = dict(options) if whole else dict(options, replicas=dist.group.WORLD)
        if whole:
            how.pop("divide_work", None)
        self.optimizer = getattr(thalweg.torch, rule)(list(self.params.items()), lr=0.01, **how)

    def step(self) -> None:
        self.optimizer.step()


def place(x: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor, Shard

    own = x.chunk(dist.get_world_size())[dist.get_rank()].clone()
    return DTensor.from_local(own, mesh(), [Shard(0)], run_check=False)


@functools.cache
def mesh() -> Any:
    """One for all tensors: another one may have a process group of its own, and messages of its own then."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cuda", (dist.get_world_size(),))


def error_of(model: Model, begin: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest distance from the update of an unsharded step, relative to the update, of any tensor."""
    errors = []
    for name, p in model.params.items():
        own = p.detach()
        first, last = begin[name], wanted[name]
        if hasattr(own, "to_local"):
            rows = len(own.to_local())
            own, first, last = own.to_local(), first[:rows], last[:rows]
        errors.append(float((own - last).norm() / (last - first).norm()))
    return max(errors)


def locals_of(pair: Sequence[Any]) -> list[Tensor]:
    return [p.to_local() if hasattr(p, "to_local") else p for p in pair]


# ---- messages


class Recorder:
    """Sends messages, and keeps what arrives in the host's memory."""

    def __init__(self) -> None:
        self.send, self.heard = collectives.all_to_all, []

    def __call__(self, arrived: Tensor, message: Tensor, *how: Any) -> Any:
        place, work = len(self.heard), self.send(arrived, message, *how)
        self.heard.append(None)

        def keep() -> None:
            work.wait()
            self.heard[place] = arrived.cpu().pin_memory()

        return Work(keep)


class Work:
    def __init__(self, wait: Any) -> None:
        self.wait = wait


class Stand:
    """Copies in place of messages, with what was heard before."""

    def __init__(self, heard: Sequence[Tensor]) -> None:
        self.heard, self.count = heard, 0
        self.streams = [torch.cuda.Stream() for _ in range(2)]
        self.room: dict[int, Tensor] = {}

    def __call__(self, arrived: Tensor, message: Tensor, incoming: list[int], outgoing: list[int], _: Any) -> Any:
        mine, main = dist.get_rank(), torch.cuda.current_stream()
        place, self.count = self.count % len(self.heard), self.count + 1
        if place not in self.room:
            self.room[place] = torch.empty(message.shape, dtype=message.dtype, pin_memory=True)
        ends = []
        for stream, pairs in zip(
            self.streams,
            (
                zip(self.room[place].split(outgoing), message.split(outgoing), strict=True),
                zip(arrived.split(incoming), self.heard[place].split(incoming), strict=True),
            ),
            strict=True,
        ):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                for rank, (to, source) in enumerate(pairs):
                    if rank != mine and to.numel():
                        to.copy_(source, non_blocking=True)
                if stream is self.streams[1] and incoming[mine]:
                    arrived.split(incoming)[mine].copy_(message.split(outgoing)[mine])
                ends.append(stream.record_event())
        return Work(lambda: [torch.cuda.current_stream().wait_event(end) for end in ends])


# ---- times


def host_times(model: Model) -> float:
    found = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        model.step()
        found.append(1e3 * (time.perf_counter() - begin))
    torch.cuda.synchronize()
    return statistics.median(found)


def device_times(model: Model) -> float:
    found = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        model.step()
        torch.cuda.synchronize()
        found.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(found)


def trace_of(model: Model, path: Path) -> list[dict[str, Any]]:
    """What ran on the GPU in one step: name, stream, begin and length, in ms."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        model.step()
        torch.cuda.synchronize()
    seen.export_chrome_trace(str(path))
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("cat") in DEVICE]
    path.unlink()
    first = min(e["ts"] for e in events)
    return [
        {"name": e["name"], "begin": (e["ts"] - first) / 1e3, "end": (e["ts"] - first + e["dur"]) / 1e3}
        for e in sorted(events, key=lambda e: e["ts"])
    ]


DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
#: The rows of the picture, and how their events are called.
KINDS = ("to others", "kernels", "from others")


def kind_of(name: str) -> str:
    if name.startswith("Memcpy DtoH"):
        return "to others"
    if name.startswith("Memcpy HtoD"):
        return "from others"
    return "kernels"


def union(spans: Iterable[Span], gap: float = 0.0) -> list[Span]:
    """Spans that overlap, or are no further apart than a gap, as one."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1] + gap:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def common(one: Iterable[Span], other: Sequence[Span]) -> list[Span]:
    pairs = ((max(a, c), min(b, d)) for a, b in one for c, d in other)
    return [(begin, end) for begin, end in pairs if begin < end]


def figures_of(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    spans = {kind: union((e["begin"], e["end"]) for e in events if kind_of(e["name"]) == kind) for kind in KINDS}
    messages = union([*spans["to others"], *spans["from others"]])
    span = max(e["end"] for e in events)
    return {
        "span": span,
        "kernels": length(spans["kernels"]),
        "messages": length(messages),
        "hidden": length(common(messages, spans["kernels"])) / length(messages),
        # as fine as a picture shows it
        "spans": {
            kind: [[round(x, 3) for x in pair] for pair in union(own, span / 400)] for kind, own in spans.items()
        },
    }


def host_calls(model: Model, count: int = 14) -> list[str]:
    """Where the host spends its time in a step, in ms."""
    import cProfile
    import pstats

    torch.cuda.synchronize()
    with cProfile.Profile() as profile:
        model.step()
    calls = sorted(pstats.Stats(profile).stats.items(), key=lambda pair: -pair[1][2])[:count]
    return [f"{Path(place[0]).name}:{place[2]} {own[0]} calls {1e3 * own[2]:.2f}" for place, own in calls]


def longest_kernels(events: Sequence[dict[str, Any]], count: int = 6) -> list[str]:
    spent: dict[str, float] = {}
    for e in events:
        spent[e["name"]] = spent.get(e["name"], 0.0) + e["end"] - e["begin"]
    order = sorted(spent.items(), key=lambda pair: -pair[1])[:count]
    return [f"{kind_of(name)}: {name[:60]} {ms:.3f}" for name, ms in order]


# ---- ranks


def measure(run: str, shapes: dict[str, tuple[int, int]]) -> dict[str, Any]:
    first, mine = dist.get_rank() == 0, collectives.all_to_all
    begin: dict[str, Tensor] = {}
    wanted: dict[str, Tensor] = {}
    found: dict[str, Any] = {"run": run}
    if first:
        whole = Model(run, shapes, whole=True)
        begin = {name: p.detach().clone() for name, p in whole.params.items()}
        for _ in range(STEPS):
            whole.step()
        wanted = {name: p.detach().clone() for name, p in whole.params.items()}
        found["host unsharded"], found["step unsharded"] = host_times(whole), device_times(whole)
        del whole
        torch.cuda.empty_cache()
    dist.barrier()
    model, recorder = Model(run, shapes, whole=False), Recorder()
    collectives.all_to_all = recorder
    marks = []
    for _ in range(STEPS):
        model.step()
        marks.append(len(recorder.heard))
    if first:
        found["error over gloo"] = error_of(model, begin, wanted)
    collectives.all_to_all = mine
    torch.cuda.synchronize()
    dist.barrier()
    models = [Model(run, shapes, whole=False) for _ in range(2)]
    for model, recorded in zip(models, "01", strict=True):
        os.environ["THALWEG_REPLAY"] = recorded
        collectives.all_to_all = Stand(recorder.heard[: marks[0]])
        model.step()  # in which ranks also compare their options
    dist.barrier()
    if first:
        stands = [Stand(recorder.heard[marks[-2] :]) for _ in models]
        for turn in range(WARM + 3):
            for model, stand in zip(models, stands, strict=True):
                collectives.all_to_all = stand
                model.step()
            if turn == STEPS - 2:
                found["error with copies"] = error_of(models[1], begin, wanted)
        both = zip(*(model.params.values() for model in models), strict=True)
        found["recorded and not"] = max(float((a - b).detach().abs().max()) for a, b in map(locals_of, both))
        model = models[1]
        found["host"], found["step"] = host_times(model), device_times(model)
        events = trace_of(model, Path(f"trace-{os.getpid()}.json"))
        found.update(figures_of(events), longest=longest_kernels(events), calls=host_calls(model))
        found["megabytes"] = sum(heard.nbytes for heard in recorder.heard[marks[-2] :]) / 1e6
    collectives.all_to_all = mine
    dist.barrier()
    return found


def work(rank: int, given: argparse.Namespace, answers: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(PORT))
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    shapes = shapes_of(given.layers, given.width)
    for run in given.only.split(";"):
        answers.put((rank, measure(run, shapes)))
        torch.cuda.empty_cache()
    dist.destroy_process_group()


def record(given: argparse.Namespace) -> None:
    """Run, and write the record anew whenever a run has ended."""
    about = {"date": time.strftime("%Y-%m-%d"), "device": torch.cuda.get_device_name(), "torch": torch.__version__}
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=work, args=(rank, given, answers)) for rank in range(2)]
    for each in ranks:
        each.start()
    runs: list[dict[str, Any]] = []
    for _ in range(2 * len(given.only.split(";"))):
        rank, found = answers.get(timeout=300)
        if rank == 0:
            told = {k: round(v, 7 if "error" in k else 3) for k, v in found.items() if isinstance(v, float)}
            lines = [f"{found['run']}: {told}", *found.pop("longest"), *found.pop("calls")]
            sys.stdout.write("\n    ".join(lines) + "\n")
            sys.stdout.flush()
            runs.append(found)
            whole = {**about, "layers": given.layers, "width": given.width, "runs": runs}
            given.record.write_text(json.dumps(whole, separators=(",", ":")) + "\n")
    for each in ranks:
        each.join()


def draw(known: dict[str, Any], path: Path, runs: Sequence[str]) -> None:
    from thalweg.show.palette import colour_of
    from thalweg.show.pictures import QUIET, entitle, figure, quieten, save

    chosen = [run for run in known["runs"] if run["run"] in runs]
    picture = figure(9, 0.8 + 1.6 * len(chosen))
    for axes, run in zip(picture.subplots(len(chosen), squeeze=False)[:, 0], chosen, strict=True):
        quieten(axes)
        axes.grid(visible=False, axis="y")
        colour = colour_of(run["run"].split(",")[0])
        for row, kind in enumerate(reversed(KINDS)):
            bars = [(begin, end - begin) for begin, end in run["spans"][kind]]
            axes.broken_barh(bars, (row - 0.4, 0.8), color=colour if kind == "kernels" else QUIET)
        axes.set_yticks(range(len(KINDS)), reversed(KINDS))
        axes.set_xlabel("ms")
        entitle(axes, run["run"], f"{run['hidden']:.0%} of the time of messages is hidden behind kernels")
    save(picture, path.parent, path.stem, ["svg"])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=24, help="(default: %(default)s)")
    parser.add_argument("--width", type=int, default=1024, help="(default: %(default)s)")
    parser.add_argument("--only", default=";".join(RUNS), help="runs, separated by semicolons (default: all)")
    parser.add_argument("--record", type=Path, required=True, help="write the figures, or draw those that are there")
    parser.add_argument("--draw", type=Path, help="draw what is recorded into this SVG file, and run nothing")
    given = parser.parse_args(arguments)
    if given.draw:
        draw(json.loads(given.record.read_text()), given.draw, given.only.split(";"))
    else:
        record(given)


if __name__ == "__main__":
    main()
