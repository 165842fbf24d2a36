"""Every optimizer that is installed, ours and the peers, through one check of sharded training.

    python benchmarks/sharded_peers.py --only kron

Two gloo ranks hold a model of eight tensors under FSDP2 (fully_shard) and take four steps with given gradients. One
process takes the same steps without sharding. The table tells how far apart the updates end, how many collectives a
step needs, and whether a distributed checkpoint of the two ranks, saved after two steps, goes on in one process.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import io
import json
import math
import multiprocessing
import os
import platform
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from thalweg.show.published import is_installed, prepare_timm

MODELS = {
    "even": [(64, 32), (64,), (32, 64), (32,), (16, 8, 3, 3), (16,), (130, 140), (140, 2)],
    # two ranks cannot halve these, and one of them has nothing of the last
    "uneven": [(63, 32), (63,), (31, 64), (31,), (15, 8, 3, 3), (15,), (131, 140), (1, 6)],
}
STEPS, SAVED_AFTER = 4, 2
TIMEOUT = 120


@dataclass(frozen=True)
class Peer:
    """Where an optimizer is imported from, and how it is made."""

    package: str
    module: str
    name: str
    options: dict[str, Any]

    @property
    def title(self) -> str:
        told = ", ".join(f"{key}={value}" for key, value in self.options.items() if key == "foreach")
        return f"{self.package} {self.name}" + (f"({told})" if told else "")

    def build(self, params: Any) -> Any:
        if self.package == "timm":
            prepare_timm()
        return getattr(importlib.import_module(self.module), self.name)(params, **self.options)


LAMB, LARS = dict(lr=1e-2, weight_decay=0.01), dict(lr=10.0, weight_decay=1e-4, momentum=0.9)
ADAFACTOR, KRON = dict(lr=1e-2), dict(lr=1e-3)
GIVEN = dict(lr=1e-2, relative_step=False)
PEERS = [
    Peer("thalweg", "thalweg.torch", "LARS", LARS),
    Peer("timm", "timm.optim.lars", "Lars", LARS),
    Peer("pytorch_optimizer", "pytorch_optimizer", "LARS", dict(**LARS, foreach=False)),
    Peer("pytorch_optimizer", "pytorch_optimizer", "LARS", dict(**LARS, foreach=True)),
    Peer("thalweg", "thalweg.torch", "LAMB", LAMB),
    Peer("timm", "timm.optim.lamb", "Lamb", LAMB),
    Peer("pytorch_optimizer", "pytorch_optimizer", "Lamb", dict(**LAMB, foreach=False)),
    Peer("pytorch_optimizer", "pytorch_optimizer", "Lamb", dict(**LAMB, foreach=True)),
    Peer("thalweg", "thalweg.torch", "Adafactor", ADAFACTOR),
    Peer("torch", "torch.optim", "Adafactor", dict(**ADAFACTOR, foreach=False)),
    Peer("torch", "torch.optim", "Adafactor", dict(**ADAFACTOR, foreach=True)),
    Peer("timm", "timm.optim.adafactor", "Adafactor", ADAFACTOR),
    Peer("timm", "timm.optim.adafactor_bv", "AdafactorBigVision", ADAFACTOR),
    Peer("transformers", "transformers.optimization", "Adafactor", GIVEN),
    Peer("pytorch_optimizer", "pytorch_optimizer", "AdaFactor", dict(**GIVEN, foreach=False)),
    Peer("pytorch_optimizer", "pytorch_optimizer", "AdaFactor", dict(**GIVEN, foreach=True)),
    Peer("thalweg", "thalweg.torch", "Kron", KRON),
    Peer("timm", "timm.optim.kron", "Kron", KRON),
    Peer("pytorch_optimizer", "pytorch_optimizer", "Kron", KRON),
    Peer("kron_torch", "kron_torch", "Kron", KRON),
]


def model_of(shapes: Sequence[tuple[int, ...]]) -> Any:
    import torch

    random = torch.Generator().manual_seed(0)
    model = torch.nn.Module()
    for index, shape in enumerate(shapes):
        value = torch.empty(shape).normal_(generator=random) * 0.1
        model.register_parameter(f"p{index}", torch.nn.Parameter(value))
    return model


def set_gradients(model: Any, shapes: Sequence[tuple[int, ...]], step: int) -> None:
    """The same numbers whoever holds them."""
    import torch

    random = torch.Generator().manual_seed(100 + step)
    for p, shape in zip(model.parameters(), shapes, strict=True):
        gradient = torch.empty(shape).normal_(generator=random)
        if hasattr(p, "device_mesh"):
            from torch.distributed.tensor import distribute_tensor

            gradient = distribute_tensor(gradient, p.device_mesh, p.placements)
        p.grad = gradient


def take(model: Any, optimizer: Any, shapes: Sequence[tuple[int, ...]], first: int, last: int) -> int:
    """Steps, and how many collectives the last of them needed."""
    import torch

    counted = 0
    for step in range(first, last):
        set_gradients(model, shapes, step)
        torch.manual_seed(step)  # for those that draw from the global generator: the same on every rank
        with listener() as heard:
            optimizer.step()
        counted = heard.count
    return counted


def listener() -> Any:
    """Counts collectives, those within operations on DTensors included."""
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    class Listener(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(issubclass(kind, DTensor) for kind in types):
                return NotImplemented  # what it is made of comes by again
            if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
                self.count += 1
            return func(*args, **(kwargs or {}))

    return Listener()


def whole(model: Any) -> list[Any]:
    return [p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach().clone() for p in model.parameters()]


def settle() -> None:
    """One thread a process; warnings are not what is looked at."""
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)


def sharded(rank: int, folder: Path, peer: Peer) -> dict[str, Any]:
    """One of two ranks."""
    settle()
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=TIMEOUT / 2))
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    found: dict[str, Any] = {}
    for title, shapes in MODELS.items():
        try:
            model = fully_shard(model_of(shapes), mesh=mesh)
            optimizer = peer.build(model.parameters())
            take(model, optimizer, shapes, 0, SAVED_AFTER)
            if title == "even":
                found["save"] = saved(model, optimizer, folder / "checkpoint")
            collectives = take(model, optimizer, shapes, SAVED_AFTER, STEPS)
            values = whole(model)
        except Exception as error:
            # who is late in a collective learns of it too: nobody goes on
            found[title] = told(error)
            break
        if rank == 0:
            torch.save(values, folder / f"{title}.pt")
        found.setdefault("collectives", collectives)
    return found


def saved(model: Any, optimizer: Any, folder: Path) -> str | None:
    """None, or why not."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    try:
        parameters, state = get_state_dict(model, optimizer)
        dcp.save({"model": parameters, "optimizer": state}, checkpoint_id=folder)
    except Exception as error:
        return told(error)
    return None


def alone(_: int, folder: Path, peer: Peer) -> dict[str, Any]:
    """One process: the same steps, and those after the checkpoint."""
    settle()
    import torch

    found: dict[str, Any] = {}
    for title, shapes in MODELS.items():
        model = model_of(shapes)
        before = whole(model)
        take(model, peer.build(model.parameters()), shapes, 0, STEPS)
        wanted = whole(model)
        if (folder / f"{title}.pt").exists():
            found[title] = distance(torch.load(folder / f"{title}.pt"), wanted, before)
        if title == "even" and (folder / "checkpoint" / ".metadata").exists():
            try:
                found["resumed"] = distance(resumed(peer, shapes, folder / "checkpoint"), wanted, before)
            except Exception as error:
                found["resume"] = told(error)
    return found


def resumed(peer: Peer, shapes: Sequence[tuple[int, ...]], folder: Path) -> list[Any]:
    """Parameters after the steps that follow the checkpoint."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model = model_of(shapes)
    optimizer = peer.build(model.parameters())
    parameters, state = get_state_dict(model, optimizer)
    content = {"model": parameters, "optimizer": state}
    dcp.load(content, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"])
    take(model, optimizer, shapes, SAVED_AFTER, STEPS)
    return whole(model)


def distance(values: Sequence[Any], wanted: Sequence[Any], before: Sequence[Any]) -> float:
    """The largest relative error of the total update of a tensor."""
    return max(float((a - b).norm() / (b - c).norm()) for a, b, c in zip(values, wanted, before, strict=True))


def told(error: BaseException) -> str:
    """An exception in a few words."""
    if getattr(error, "failures", None):  # of a distributed checkpoint: what each rank said
        error = next(iter(error.failures.values()))[0]  # type: ignore[attr-defined]
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:90]}{'...' if len(words) > 90 else ''}"


def run_one(work: Callable[..., dict[str, Any]], rank: int, folder: Path, peer: Peer) -> None:
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # some print
            found = work(rank, folder, peer)
    except Exception as error:
        found = {"even": told(error)}
    (folder / f"{work.__name__}{rank}.json").write_text(json.dumps(found))
    os._exit(0)  # whoever waits for this rank learns at once that it is gone


def in_processes(work: Callable[..., dict[str, Any]], count: int, folder: Path, peer: Peer) -> dict[str, Any]:
    """What all of them found; of faults, the one that is not a consequence of the others."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=run_one, args=(work, rank, folder, peer)) for rank in range(count)]
    for process in processes:
        process.start()
    found: dict[str, Any] = {}
    for rank, process in enumerate(processes):
        process.join(TIMEOUT)
        if process.is_alive():
            process.kill()
            process.join()
        answer = folder / f"{work.__name__}{rank}.json"
        own = json.loads(answer.read_text()) if answer.exists() else {"even": "does not come back"}
        for key, value in own.items():
            if key not in found or (isinstance(found[key], str) and "gloo" in found[key]):
                found[key] = value
    return found


def checked(peer: Peer) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        found = in_processes(sharded, 2, Path(name), peer)
        return {**in_processes(alone, 1, Path(name), peer), **found}


def cell(value: Any) -> str:
    """Errors as numbers, faults in words."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else f"{value:.0e}"
    return "-" if value is None else str(value).replace("|", "/")


def row(peer: Peer, found: dict[str, Any]) -> str:
    title = f"**{peer.title}**" if peer.package == "thalweg" else peer.title
    checkpoint = found.get("save") or found.get("resume") or found.get("resumed")
    cells = [title, found.get("even"), found.get("uneven"), found.get("collectives"), checkpoint]
    return "| " + " | ".join(map(cell, cells)) + " |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="those whose title has this in it, in any case")
    given = parser.parse_args(arguments)
    # nobody compiles: what is compared is arithmetic and messages
    os.environ.update(TORCHDYNAMO_DISABLE="1", GLOO_SOCKET_IFNAME="lo")
    chosen = [peer for peer in PEERS if is_installed(peer.package) and given.only.lower() in peer.title.lower()]
    packages = sorted({peer.package for peer in chosen} | {"torch"})
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)
    say(f"{date.today()}. python {platform.python_version()}, {versions}; 2 gloo ranks, float32.\n")
    say("| optimizer | update, even shards | update, uneven and empty shards | collectives a step | 2 ranks to 1 |")
    say("|---|---|---|---:|---|")
    for peer in chosen:
        say(row(peer, checked(peer)))


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
