"""Checkpoints of a run over ranks: saved in one layout, resumed in another."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from tolerances import WORLD
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from world_layouts import DTensor, torch, whole
from world_steps import Run, Training, further_than, local, misplaced, part_like, unequal

import thalweg.torch
from thalweg.check import expect

#: How a checkpoint is written: of all ranks together, or a whole one by the first.
WAYS: Mapping[str, Callable[[], StateDictOptions]] = {
    "nested": StateDictOptions,
    "flat": lambda: StateDictOptions(flatten_optimizer_state_dict=True),
    "offloaded": lambda: StateDictOptions(cpu_offload=True),
    "full": lambda: StateDictOptions(full_state_dict=True, cpu_offload=True),
    "full, flat": lambda: StateDictOptions(full_state_dict=True, cpu_offload=True, flatten_optimizer_state_dict=True),
    "while steps are taken": StateDictOptions,
}


def snapshot(training: Training) -> dict[str, Any]:
    """All there is, whole."""
    states = {name: {key: whole(x).clone() for key, x in state.items()} for name, state in training.states.items()}
    groups = [{key: v for key, v in g.items() if key != "params"} for g in training.optimizer.param_groups]
    return {"params": {n: whole(p).clone() for n, p in training.params.items()}, "state": states, "groups": groups}


def differing(first: Any, second: Any) -> list[str]:
    """Where two nested structures are not equal to the last bit, dtypes included."""
    try:
        expect.same(second, first, "")
    except pytest.fail.Exception as what:
        return [str(what)]
    return []


def write(training: Training, folder: Path, way: str) -> None:
    """By torch's own means."""
    options = WAYS[way]()
    model, optim = get_state_dict(training.net, training.optimizer, options=options)
    if way == "while steps are taken":
        group = torch.distributed.new_group(backend="gloo")  # its messages must not meet those of the steps
        future: Any = dcp.async_save({"model": model, "optim": optim}, checkpoint_id=folder, process_group=group)
        training.steps(middle(training.run), len(training.run.rates))
        future.result()
    elif not options.full_state_dict:
        dcp.save({"model": model, "optim": optim}, checkpoint_id=folder)
    elif torch.distributed.get_rank() == 0:
        folder.mkdir()
        torch.save({"model": model, "optim": optim}, folder / "whole.pt")


def read(training: Training, folder: Path, way: str) -> None:
    options = WAYS[way]()
    if not options.full_state_dict:
        model, optim = get_state_dict(training.net, training.optimizer, options=options)
        found = {"model": model, "optim": optim}
        dcp.load(found, checkpoint_id=folder)
    else:
        found = torch.load(folder / "whole.pt", weights_only=True)
    set_model_state_dict(training.net, found["model"], options=options)
    if way == "full, flat":  # which torch cannot unflatten and divide at once: we divide
        options = WAYS["flat"]()
    set_optimizer_state_dict(training.net, training.optimizer, found["optim"], options=options)


def middle(run: Run) -> int:
    return len(run.rates) // 2


def save(folder: Path, run: Run, layout: str, way: str = "nested", *, at: int | None = None) -> None:
    """Train for some steps and save; beside it, what there is, for comparison. at: after how many, if not the half."""
    training = Training(run, layout).steps(0, middle(run) if at is None else at)
    if run.absent or at == 0:
        training.optimizer.make_state()
    seen = snapshot(training)
    write(training, folder / "checkpoint", way)
    if torch.distributed.get_rank() == 0:
        torch.save(seen, folder / "seen.pt")
    torch.distributed.barrier()


def resume(
    folder: Path,
    run: Run,
    layout: str,
    way: str = "nested",
    *,
    at: int | None = None,
    begun: int = 0,
    exact: bool = False,
) -> list[str]:
    """What of a checkpoint is not as it was saved, or goes on otherwise than without an interruption.

    begun: how many steps were taken before it is read. exact: compared to the bit, with the same layout.
    """
    training = Training(run, layout, seed=7).steps(0, begun)  # nothing is right before it is loaded
    read(training, folder / "checkpoint", way)
    found = differing(torch.load(folder / "seen.pt", weights_only=False), snapshot(training))
    training.steps(middle(run) if at is None else at, len(run.rates))
    alone = Training(run, layout if exact else "plain")
    alone.steps(0, len(run.rates))
    found += differing(snapshot(alone), snapshot(training)) if exact else list(unequal(alone, training))
    return [*found, *misplaced(training)]


def resumed(folder: Path, run: Run, before: str, after: str, way: str = "nested", **how: Any) -> list[str]:
    """The same where as many ranks resume as have saved."""
    save(folder, run, before, way, at=how.get("at"))
    return resume(folder, run, after, way, **how)


def places(training: Training) -> dict[str, Any]:
    """Of all state its shapes, dtypes and how it lies over ranks."""
    return {
        f"{name}.{key}": (tuple(x.shape), x.dtype, str(x.placements) if isinstance(x, DTensor) else "plain")
        for name, state in training.states.items()
        for key, x in state.items()
    }


def state_before_steps(run: Run, layout: str, *, asked: bool) -> list[str]:
    """What a loader moves that asks an optimizer for its state before the first step, and what is missing then.

    asked: whether state was made before, which the loader finds; else it takes a step.
    """
    training, other = Training(run, layout), Training(run, layout)
    if asked:
        training.optimizer.make_state()
    before = snapshot(training)
    get_optimizer_state_dict(training.net, training.optimizer)
    after, made = snapshot(training), places(training)
    found = [line for key in before if asked or key != "state" for line in differing(before[key], after[key])]
    other.steps(0, middle(run))
    found += differing(places(other), made)
    if asked:
        found += differing(snapshot(other), snapshot(training.steps(0, middle(run))))
    return found


def told(action: Callable[[], Any]) -> str:
    try:
        action()
    except BaseException as error:  # what the engine wraps the errors of ranks in is none of Exception
        return f"{type(error).__name__}: {error}"
    return ""


def misfit(folder: Path, saved: Run, run: Run, way: str) -> str:
    """What is said of a checkpoint that does not fit."""
    save(folder, saved, "FSDP2", way)
    training = Training(run, "FSDP2")
    return told(lambda: read(training, folder / "checkpoint", way))


def loaded_directly(saved: Run, run: Run, before: str, after: str) -> tuple[str, list[str], list[str]]:
    """By ``load_state_dict`` alone: what is said, what is not as it was saved, and what is not as it was before."""
    first, training = Training(saved, before).steps(0, middle(saved)), Training(run, after, seed=7).steps(0, 1)
    seen, lying = snapshot(training), places(training)
    said = told(lambda: training.optimizer.load_state_dict(first.optimizer.state_dict()))
    new, wanted = snapshot(training), snapshot(first)["state"]
    training.steps(1, 2)
    moved = [*differing(wanted, new["state"]), *differing(lying, places(training))]
    return said, moved, differing(seen, new)


#: torch's optimizer, our rule, what is said to both, and what more to ours.
PEERS: Mapping[str, tuple[str, str, Mapping[str, Any], Mapping[str, Any]]] = {
    "AdamW": ("AdamW", "AdamW", dict(weight_decay=0.1), {}),
    "Adafactor": ("Adafactor", "Adafactor", dict(eps=(2.0**-23, 1e-3)), dict(variant="torch")),
}


def continued(case: str, before: str, after: str) -> list[str]:
    """Where a run that torch began in one layout and we continue in another is not the run that torch ends alone."""
    there, rule, options, more = PEERS[case]
    run = Run(rule, options={**options, **more}, names=("short", "vector", "matrix", "cube"), rates=(1.0,) * 6)
    alone, begun, again = Training(run, "plain"), Training(run, before), Training(run, after)
    for training in (alone, begun):
        training.optimizer = getattr(torch.optim, there)(training.net.named_parameters(), lr=run.lr(0), **options)
    alone.steps(0, 6)
    begun.steps(0, 3)
    with torch.no_grad():
        for name, p in begun.params.items():
            local(again.own[name]).copy_(part_like(again.own[name], whole(p)))
    thalweg.torch.import_peer(again.optimizer, copy.deepcopy(begun.optimizer.state_dict()))
    again.steps(3, 6)
    return [
        line
        for name, p in alone.params.items()
        for line in further_than(WORLD[run.dtype], name, again.params[name], p, torch.zeros_like(p))
    ]
