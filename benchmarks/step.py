"""How long one optimizer step takes: thalweg's beside torch's, timm's, optax's and others that are installed.

    python benchmarks/step.py                                               # LAMB, LARS and Adafactor on GPT-2
    python benchmarks/step.py --model small --optimizers all --threads 1    # 148 small tensors
    python benchmarks/step.py --device cuda --model gpt2 --optimizers adamw,lamb --json step.json
    python benchmarks/step.py --front-end jax --optimizers adamw,lamb       # beside optax, compiled
    python benchmarks/step.py --ranks 2 --model small                       # parameters sharded by FSDP2

Each table compares one rule: ours, those of its peers that are installed, and torch's fused AdamW (in JAX, optax's). It
begins with the floor: the bytes that the passes of our rule move, at the speed of a copy measured in the same run.
Rules that multiply matrices have none; tensors that fit into caches can be stepped faster.

In turns     In every round each contestant has its turn, the median of 20 steps (3 of models with more than 16
             million numbers). Shown are the median of the rounds, their quartiles, and "/ ours": median by median.
Gradients    are allocated anew before every step, at addresses that no earlier step of this contestant has seen as a
             set. In JAX they are new arrays, and stay the same within a loop.
step, host   until step() returns, on a GPU begun with an empty queue. In JAX step is until parameters are there.
device       on GPUs: between two events around a step, in a queue that is held until the host has queued all of it.
loop         in JAX: a compiled program of 20 steps, divided by 20; on GPUs this is the column device.
extra        on GPUs: the most memory that torch allocates during a step, beyond what was in use before it.

Muon steps the matrices that are no tables. SOAP's time is the mean over one period of its refreshes; Kron refreshes its
factors in every step. --option changes ours alone. Under --ranks the slowest rank counts, and no floor is stated.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import gc
import importlib.metadata
import inspect
import io
import json
import math
import os
import pkgutil
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import thalweg.torch
from thalweg.errors import CommandError, OptimError
from thalweg.given import TABLE
from thalweg.plan.models import BUILT_IN
from thalweg.programs.budget import bytes_moved
from thalweg.rules import RULES
from thalweg.settings import RuleOptions, option_names

#: Our options, where they are not the defaults.
OURS: dict[str, dict[str, Any]] = {
    "SGD": dict(lr=1e-3, momentum=0.9),
    "LAMB": dict(lr=1e-3, weight_decay=0.01),
    "LARS": dict(lr=10.0, weight_decay=1e-4),  # a rate whose steps are seen in bfloat16
    "Adafactor": dict(lr=1e-3),
    "Muon": dict(lr=1e-3, weight_decay=0.1),
    "Kron": dict(lr=1e-3, precond_update_probability=1.0),
}
#: The peers of each rule: where they are imported from, and options for arithmetic of the same kind. What differs
#: still: pytorch_optimizer's Lamb corrects no bias, and its LARS gives vectors no ratio; timm's Adafactor does not
#: multiply its rate by RMS(p); each Adafactor factors other axes of convolutions; our Kron keeps a diagonal where a
#: dense factor would be larger than the tensor.
PEERS: Sequence[tuple[str, str, dict[str, Any]]] = [
    ("SGD", "torch.optim.SGD", dict(lr=1e-3, momentum=0.9, fused=True)),
    ("SGD", "optax.sgd", dict(learning_rate=1e-3, momentum=0.9)),
    ("AdamW", "torch.optim.AdamW", dict(lr=1e-3, weight_decay=0.01, fused=True)),
    ("AdamW", "optax.adamw", dict(learning_rate=1e-3, weight_decay=0.01)),
    ("LAMB", "timm.optim.lamb.Lamb", dict(lr=1e-3, weight_decay=0.01, max_grad_norm=None)),
    ("LAMB", "pytorch_optimizer.Lamb", dict(lr=1e-3, weight_decay=0.01, weight_decouple=False, foreach=True)),
    ("LAMB", "optax.lamb", dict(learning_rate=1e-3, weight_decay=0.01)),
    ("LARS", "timm.optim.lars.Lars", dict(lr=10.0, weight_decay=1e-4, momentum=0.9)),
    ("LARS", "pytorch_optimizer.LARS", dict(lr=10.0, weight_decay=1e-4, foreach=True)),
    ("LARS", "optax.lars", dict(learning_rate=10.0, weight_decay=1e-4)),
    ("Adafactor", "torch.optim.Adafactor", dict(lr=1e-3, foreach=True)),
    ("Adafactor", "timm.optim.adafactor.Adafactor", dict(lr=1e-3)),
    ("Adafactor", "optax.adafactor", dict(learning_rate=1e-3)),
    ("Lion", "timm.optim.lion.Lion", dict(lr=1e-4, foreach=True)),
    ("Lion", "optax.lion", dict(learning_rate=1e-4, weight_decay=0.0)),
    ("AdEMAMix", "pytorch_optimizer.AdEMAMix", dict(lr=1e-3, foreach=True)),
    ("AdEMAMix", "optax.contrib.ademamix", dict(learning_rate=1e-3)),
    ("MARS", "timm.optim.mars.Mars", dict(lr=3e-3, optimize_1d=True)),
    ("Muon", "torch.optim.Muon", dict(lr=1e-3, weight_decay=0.1)),
    ("Muon", "timm.optim.muon.Muon", dict(lr=1e-3, weight_decay=0.1, nesterov=True)),
    ("Muon", "optax.contrib.muon", dict(learning_rate=1e-3, weight_decay=0.1)),
    ("Kron", "kron_torch.Kron", dict(lr=1e-3, preconditioner_update_probability=1.0)),
    ("Kron", "timm.optim.kron.Kron", dict(preconditioner_update_probability=1.0, max_size_triangular=8192)),
    ("SOAP", "pytorch_optimizer.SOAP", dict(lr=3e-3)),
]
CONTROL = {"torch": PEERS[2], "jax": PEERS[3]}  # in every table: what everybody knows
COPIED = 2**29  # bytes of an array that is copied
LOOP = 20  # steps of a compiled loop in JAX

Shapes = Mapping[str, tuple[int, ...]]
Entered = tuple[str, Callable[[], Any]]  # a name, and what makes the contestant
Samples = dict[str, dict[str, list[float]]]  # seconds by contestant and column


# ---- what is stepped


def choose_shapes(given: argparse.Namespace, rule: str) -> Shapes:
    """The tensors that a rule steps: Muon the matrices that are no tables, others all but those left out."""
    chosen = {}
    for name, shape in BUILT_IN[given.model]():
        is_left_out = any(fnmatchcase(name, pattern) for pattern in given.without)
        is_hidden_matrix = len(shape) == 2 and not any(map(TABLE.search, name.split(".")))
        if not is_left_out and (rule != "Muon" or is_hidden_matrix):
            chosen[name] = shape
    if not chosen:
        raise CommandError(f"nothing of {given.model} is left for {rule} to step")
    return chosen


def set_options(rule: Any, options: Mapping[str, Any]) -> Any:
    """The rule with these options, which are checked."""
    return RuleOptions(rule, {name: value for name, value in options.items() if name != "lr"}).base


def measure_copy(device: str) -> float:
    """Bytes a second that a copy reads and writes: the best of several."""
    source = torch.ones(COPIED // 4, device=device)
    target, copies, best = torch.zeros_like(source), 1 if device == "cpu" else 10, 0.0
    for _ in range(10):
        wait(device == "cuda")
        begin = time.perf_counter()
        for _ in range(copies):
            target.copy_(source)
        wait(device == "cuda")
        best = max(best, 2 * COPIED * copies / (time.perf_counter() - begin))
    return best


# ---- torch


class TorchContestant:
    """An optimizer of torch with parameters of its own. clip: the norm for clip_grad_norm_ before each step."""

    def __init__(self, optimizer: Any, params: list[Any], gradients: list[Any], clip: float | None) -> None:
        self.optimizer, self.params, self.gradients, self.clip = optimizer, params, gradients, clip
        self.is_on_gpu = params[0].is_cuda
        self.seen: set[tuple[int, ...]] = set()  # addresses that gradients have had
        self.extra: int | None = None

    def give_gradients(self) -> None:
        """Allocate all gradients anew, in a random order, until their addresses are a set that no step has seen."""
        held = []
        while True:
            fresh: list[Any] = [None] * len(self.params)
            for index in random.sample(range(len(fresh)), len(fresh)):
                fresh[index] = self.gradients[index].clone()
            addresses = tuple(local_part(gradient).data_ptr() for gradient in fresh)
            if addresses not in self.seen:
                break
            held.append(fresh)
        self.seen.add(addresses)
        for p, gradient in zip(self.params, fresh, strict=True):
            p.grad = gradient
        wait(self.is_on_gpu)

    def step(self) -> None:
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.params, self.clip)
        self.optimizer.step()

    def measure(self, calls: int) -> dict[str, list[float]]:
        """Seconds of some steps, by column."""
        host = [self.time_host() for _ in range(calls)]
        if not self.is_on_gpu:
            return {"step": host}
        hold = min(2 * max(host) + 1e-3, 0.5)  # first steps compile
        return {"host": host, "device": [self.time_device(hold) for _ in range(calls)]}

    def time_host(self) -> float:
        self.give_gradients()
        begin = time.perf_counter()
        self.step()
        seconds = time.perf_counter() - begin
        self.optimizer.zero_grad()
        return seconds

    def time_device(self, hold: float) -> float:
        """hold: seconds for which the queue is held, in which the host has queued the step."""
        self.give_gradients()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(2e9 * hold))  # in cycles, at 2 GHz
        start.record()
        self.step()
        end.record()
        torch.cuda.synchronize()
        self.extra = torch.cuda.max_memory_allocated() - before
        self.optimizer.zero_grad()
        return start.elapsed_time(end) / 1e3

    def probe(self) -> list[float]:
        """A few weights of the largest tensor."""
        largest = max(map(local_part, self.params), key=lambda tensor: tensor.numel())
        return [float(x) for x in largest.detach().flatten()[:8].tolist()]


def wait(is_on_gpu: bool) -> None:
    """Return when the GPU has nothing to do, and all ranks are here."""
    if is_on_gpu:
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()


def local_part(tensor: Any) -> Any:
    """What this rank has of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def gather(value: Any) -> list[Any]:
    """The values of all ranks."""
    values = [value]
    if dist.is_initialized():
        values *= dist.get_world_size()
        dist.all_gather_object(values, value)
    return values


def make_parameters(shapes: Shapes, given: argparse.Namespace) -> list[Any]:
    """New parameters, sharded by FSDP2 where there are ranks."""
    torch.manual_seed(0)
    model = torch.nn.Module()
    for index, shape in enumerate(shapes.values()):
        numbers = 0.02 * torch.randn(shape, device=given.device, dtype=getattr(torch, given.dtype))
        model.register_parameter(f"p{index}", torch.nn.Parameter(numbers))
    if given.ranks:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=dist.init_device_mesh(given.device, (given.ranks,)))
    return list(model.parameters())


def enter_torch(rule: Any, options: Mapping[str, Any], shapes: Shapes, given: argparse.Namespace) -> Iterator[Entered]:
    """Ours, then the peers."""

    def make(build: Callable[[list[Any]], Any], clip: float | None) -> TorchContestant:
        params = make_parameters(shapes, given)
        return TorchContestant(build(params), params, gradients, clip)

    gradients = [0.01 * torch.randn_like(p.detach()) for p in make_parameters(shapes, given)]
    ours = functools.partial(thalweg.torch.optimizer(rule), engine=given.engine, **options)
    yield f"thalweg {rule.__name__}", functools.partial(make, ours, None)
    for name, build in list_peers(rule, "torch"):
        yield name, functools.partial(make, build, given.clip)


# ---- JAX


class JaxContestant:
    """A compiled step with parameters of its own, which it writes in place."""

    extra = None

    def __init__(self, solver: Any, params: list[Any], gradients: list[Any]) -> None:
        import jax

        step = thalweg.optax.make_step(solver)  # of optax's it is update and apply_updates

        def loop(params: Any, state: Any, gradients: Any) -> Any:
            return jax.lax.fori_loop(0, LOOP, lambda _, carry: step(*carry, gradients), (params, state))

        self.optimizer = solver
        self.params, self.gradients, self.state = params, gradients, jax.jit(solver.init)(params)
        self.step = jax.jit(step, donate_argnums=(0, 1))
        self.loop = jax.jit(loop, donate_argnums=(0, 1))

    def time(self, program: Callable[..., Any]) -> tuple[float, float]:
        """Seconds until a program's call returns, and until it is done."""
        import jax

        gradients = [gradient.copy() for gradient in self.gradients]
        jax.block_until_ready((gradients, self.params, self.state))
        begin = time.perf_counter()
        self.params, self.state = program(self.params, self.state, gradients)
        returned = time.perf_counter() - begin
        jax.block_until_ready((self.params, self.state))
        return returned, time.perf_counter() - begin

    def measure(self, calls: int) -> dict[str, list[float]]:
        """Seconds of some steps, by column."""
        host, step = zip(*(self.time(self.step) for _ in range(calls)), strict=True)
        loop = [self.time(self.loop)[1] / LOOP]
        is_on_cpu = self.params[0].device.platform == "cpu"
        return {"step": step, "loop": loop} if is_on_cpu else {"host": host, "device": loop}

    def probe(self) -> list[float]:
        return [float(x) for x in max(self.params, key=lambda array: array.size).ravel()[:8]]


def enter_jax(rule: Any, options: Mapping[str, Any], shapes: Shapes, given: argparse.Namespace) -> Iterator[Entered]:
    """Ours by make_step and by update, then optax's."""
    import jax
    import optax

    import thalweg.optax

    def draw(seed: int, scale: float) -> list[Any]:
        keys = jax.random.split(jax.random.key(seed), len(shapes))
        pairs = zip(keys, shapes.values(), strict=True)
        return [scale * jax.random.normal(key, shape, given.dtype) for key, shape in pairs]

    def make(make_solver: Callable[[], Any]) -> JaxContestant:
        return JaxContestant(make_solver(), draw(0, 0.02), gradients)

    def make_ours() -> Any:
        kind = getattr(thalweg.optax, rule.__name__.lower())
        named = {"learning_rate" if name == "lr" else name: value for name, value in options.items()}
        if "layout" in inspect.signature(kind).parameters:  # shapes are those that torch's modules have
            named["layout"] = "torch"
        return kind(**named, engine=given.engine)

    gradients = draw(1, 0.01)
    clip = [] if given.clip is None else [optax.clip_by_global_norm(given.clip)]
    yield f"thalweg {rule.__name__}, make_step", lambda: make(make_ours)
    yield f"thalweg {rule.__name__}, update", lambda: make(lambda: optax.chain(make_ours()))
    for name, build in list_peers(rule, "jax"):
        yield name, functools.partial(make, lambda build=build: optax.chain(*clip, build()))


# ---- peers


def list_peers(rule: Any, front_end: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The peers of a rule in this front end and the control: names, and what imports and builds them."""
    is_jax = front_end == "jax"
    peers = [peer for peer in PEERS if peer[0] == rule.__name__ and peer[1].startswith("optax.") == is_jax]
    for _, path, settings in peers if CONTROL[front_end] in peers else [*peers, CONTROL[front_end]]:
        ways = [f"{way}={settings[way]}" for way in ("fused", "foreach") if way in settings]
        name = " ".join([path.partition(".")[0], path.rpartition(".")[2], *ways])
        yield name, lambda *params, path=path, settings=settings: pkgutil.resolve_name(path)(*params, **settings)


# ---- rounds


def compare(rule: Any, given: argparse.Namespace, copied: float) -> dict[str, Any]:
    """Measure a rule and its peers. copied: bytes a second of a copy."""
    options, shapes = choose_options(rule, given), choose_shapes(given, rule.__name__)
    elements = sum(math.prod(shape) for shape in shapes.values())
    setting, moved = set_options(rule, options), None
    if not (given.ranks or setting.rule.needs_whole):
        moved = sum(bytes_moved(setting, shape, given.dtype) for shape in shapes.values())
    floor = None if moved is None else moved / copied
    period = getattr(setting.rule, "precondition_frequency", 1)
    steps = 20 if elements < 16_000_000 else 3
    calls, average = (period, statistics.fmean) if period > 1 else (steps, statistics.median)
    enter = enter_jax if given.front_end == "jax" else enter_torch
    left_out: dict[str, str] = {}
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # peers warn and print
        contestants = dict(warm_up(enter(rule, options, shapes, given), left_out, 2 + period))
        samples = take_turns(contestants, given.rounds, calls, average)
        rows = {name: summarize(contestants[name], samples[name], floor) for name in contestants}
    return {
        "rule": rule.__name__,
        "options": {name: repr(value) for name, value in options.items()},
        "tensors": len(shapes),
        "elements": elements,
        "bytes_moved": moved,
        "floor": floor,
        "columns": list(next(iter(samples.values()))),
        "rows": rows,
        "left_out": left_out,
    }


def warm_up(entered: Iterator[Entered], left_out: dict[str, str], steps: int) -> Iterator[tuple[str, Any]]:
    """Make each contestant and let it step; peers that cannot are left out, with the reason."""
    for name, make in entered:
        reason = ""
        try:
            contestant = make()
            before = contestant.probe()
            contestant.measure(steps)
            if contestant.probe() == before:
                reason = "its step leaves the parameters as they were"
        except Exception as error:  # whatever a peer may lack here: the others are still worth measuring
            if name.startswith("thalweg"):
                raise
            reason = f"{type(error).__name__}: {error}".partition("\n")[0][:150]
        reason = next(filter(None, gather(reason)), "")  # of any rank
        if reason:
            left_out[name] = reason
        else:
            yield name, contestant


def take_turns(contestants: Mapping[str, Any], rounds: int, calls: int, average: Callable[..., float]) -> Samples:
    """Samples by contestant and column, one a round: the average of several calls."""
    samples: Samples = {name: {} for name in contestants}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, contestant in contestants.items():
                for column, times in contestant.measure(calls).items():
                    samples[name].setdefault(column, []).append(average(times))
    finally:
        gc.enable()
    return samples


def summarize(contestant: Any, samples: dict[str, list[float]], floor: float | None) -> dict[str, Any]:
    """The slowest rank's samples, and what they say."""
    row = {"engine": getattr(contestant.optimizer, "engine", ""), "extra_bytes": contestant.extra}
    for column in samples:
        times = [max(of_ranks) for of_ranks in zip(*gather(samples[column]), strict=True)]
        first, median, third = statistics.quantiles(times, n=4, method="inclusive")
        row[column] = {"median": median, "quartiles": [first, third], "samples": times}
        row["share_of_floor"] = None if floor is None else floor / median  # of the last one: device or loop, if any
    return row


# ---- the command


def write_table(found: Mapping[str, Any], copied: float, dtype: str) -> str:
    text = f"{found['rule']}: {found['tensors']} tensors, {found['elements']:,} {dtype} numbers"
    if found["floor"] is not None:
        moved, floor = found["bytes_moved"] / found["elements"], 1e3 * found["floor"]
        text += f", {moved:.1f} bytes each: floor {floor:.3f} ms at {copied / 1e9:.1f} GB/s"
    heads = "".join(f"{name + ', ms':>12}{'quartiles':>18}{'/ ours':>8}" for name in found["columns"])
    text += f"\n{'':44}{heads}{'of floor':>10}{'extra, MB':>11}\n"
    ours = next(iter(found["rows"].values()))
    for name, row in found["rows"].items():
        text += f"{name + (' by ' + row['engine'] if row['engine'] else ''):44}"
        for column in found["columns"]:
            median, (first, third) = row[column]["median"], row[column]["quartiles"]
            quartiles = f"{1e3 * first:.3f}-{1e3 * third:.3f}"
            text += f"{1e3 * median:12.3f}{quartiles:>18}{median / ours[column]['median']:8.2f}"
        share, extra = row["share_of_floor"], row["extra_bytes"]
        text += f"{'-' if share is None else f'{share:.0%}':>10}{'-' if extra is None else f'{extra / 1e6:.1f}':>11}\n"
    return text + "".join(f"left out: {name}: {reason}\n" for name, reason in found["left_out"].items())


def state_facts(given: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """What the figures hold for."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    versions = {"thalweg": thalweg.__version__, "python": platform.python_version()}
    for package in ("torch", "triton", "jax", "optax", "timm", "kron-torch", "pytorch_optimizer"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    with contextlib.suppress(OSError):
        versions["commit"] = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": " ".join(["python benchmarks/step.py", *arguments]),
        "device": torch.cuda.get_device_name() if given.device == "cuda" else cpu,
        "cpu": cpu,
        "threads": given.threads or torch.get_num_threads(),
        "versions": versions,
    }


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    about, _, more = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser("step.py", None, about, more, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: parser.exit(2, f"step.py: {message}\n")  # type: ignore
    parser.add_argument("--model", choices=BUILT_IN, default="gpt2", help="default: %(default)s")
    parser.add_argument("--optimizers", default="lamb,lars,adafactor", help="rules, or all (default: %(default)s)")
    parser.add_argument("--front-end", choices=["torch", "jax"], default="torch")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, help="cores that everybody has")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--option", type=read_option, action="append", default=[], metavar="NAME=VALUE", help="of ours")
    parser.add_argument("--engine", default="auto", help="of ours")
    parser.add_argument("--rounds", type=int, default=9, help="default: %(default)s")
    parser.add_argument("--clip", type=float, help="clip all gradients together to this norm")
    parser.add_argument("--ranks", type=int, default=0, help="processes among which FSDP2 shards parameters")
    parser.add_argument("--without", action="append", default=[], metavar="PATTERN", help="tensors to leave out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples")
    return parser.parse_args(arguments)


def find_rules(given: argparse.Namespace) -> list[Any]:
    rules = {name.lower(): rule for name, rule in RULES.items()}
    names = [*rules] if given.optimizers == "all" else given.optimizers.lower().split(",")
    for name in set(names) - set(rules):
        raise CommandError(f"there is no rule {name!r}: here are {', '.join(rules)}")
    return [rules[name] for name in names]


def read_option(text: str) -> tuple[str, Any]:
    """NAME=VALUE, the value as Python writes it; what Python does not know is a text."""
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


def choose_options(rule: Any, given: argparse.Namespace) -> dict[str, Any]:
    """Our options: those of the comparison, and of those that are asked for what this rule has."""
    options = {"lr": rule.default_lr, **OURS.get(rule.__name__, {})}
    if given.clip is not None:
        options["max_grad_norm"] = given.clip
    return options | {name: value for name, value in given.option if name in ("lr", "variant", *option_names(rule))}


def check(given: argparse.Namespace, rules: Sequence[Any]) -> None:
    """Refuse what cannot be, before anything is measured."""
    if given.rounds < 2:
        raise CommandError(f"--rounds must be at least 2, got {given.rounds}")
    if given.threads is not None and given.threads < 1:
        raise CommandError(f"--threads must be at least 1, got {given.threads}")
    if given.device == "cuda" and not torch.cuda.is_available():
        raise CommandError("PyTorch can use no GPU here: take --device cpu")
    if given.front_end == "jax" and given.ranks:
        raise CommandError("--ranks is for FSDP2: take --front-end torch")
    for name, _ in given.option:
        if not any(name in choose_options(rule, given) for rule in rules):
            raise CommandError(f"--option {name}: {given.optimizers} has no such option")
    for rule in rules:
        set_options(rule, choose_options(rule, given))


def limit_threads(threads: int, rank: int = 0) -> None:
    """Keep this process to some cores, no other rank's; JAX and ours go by them."""
    torch.set_num_threads(threads)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[rank * threads :][:threads] or cores)


def run_rank(rank: int, given: argparse.Namespace, folder: str) -> None:
    """One of the processes of --ranks; the first one writes what was found."""
    if given.threads is not None:
        limit_threads(given.threads, rank)
    has_own_gpu = given.device == "cuda" and torch.cuda.device_count() >= given.ranks
    if has_own_gpu:
        torch.cuda.set_device(rank)
    backend, meet = "nccl" if has_own_gpu else "gloo", f"file://{folder}/meet"
    dist.init_process_group(backend, init_method=meet, rank=rank, world_size=given.ranks)
    tables = [compare(rule, given, math.nan) for rule in find_rules(given)]
    if rank == 0:
        Path(folder, "tables.json").write_text(json.dumps(tables))
    dist.destroy_process_group()


def run_ranks(given: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (given, folder), nprocs=given.ranks)
        return json.loads(Path(folder, "tables.json").read_text())


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    given = parse(arguments)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # or JAX leaves no memory to torch
    if given.device == "cpu":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    try:
        rules = find_rules(given)
        check(given, rules)
        if given.threads is not None and not given.ranks:
            limit_threads(given.threads)
        facts, copied, tables = state_facts(given, arguments), measure_copy(given.device), []
        sys.stdout.write(f"{facts['device']}, {facts['threads']} threads, {facts['date']}\n{facts['command']}\n\n")
        for found in run_ranks(given) if given.ranks else (compare(rule, given, copied) for rule in rules):
            tables.append(found)
            sys.stdout.write(write_table(found, copied, given.dtype) + "\n")
            sys.stdout.flush()
    except OptimError as error:
        sys.stderr.write(f"step.py: {error}\n")
        raise SystemExit(2) from None
    if given.json is not None:
        record = {**facts, "model": given.model, "dtype": given.dtype, "copied_bytes_per_s": copied, "tables": tables}
        given.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
