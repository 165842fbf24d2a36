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
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from world_layouts import torch, whole
from world_steps import Run, Training, further_than, local, misplaced, part_like, unequal

import thalweg.torch
from thalweg.check import expect


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


def write(training: Training, folder: Path, *, meanwhile: bool) -> None:
    """By torch's own means. meanwhile: while the other steps are taken."""
    model, optim = get_state_dict(training.net, training.optimizer)
    if meanwhile:
        group = torch.distributed.new_group(backend="gloo")  # its messages must not meet those of the steps
        future: Any = dcp.async_save({"model": model, "optim": optim}, checkpoint_id=folder, process_group=group)
        training.steps(middle(training.run), len(training.run.rates))
        future.result()
    else:
        dcp.save({"model": model, "optim": optim}, checkpoint_id=folder)


def read(training: Training, folder: Path) -> None:
    model, optim = get_state_dict(training.net, training.optimizer)
    found = {"model": model, "optim": optim}
    dcp.load(found, checkpoint_id=folder)
    set_model_state_dict(training.net, model)
    set_optimizer_state_dict(training.net, training.optimizer, optim)


def middle(run: Run) -> int:
    return len(run.rates) // 2


def save(folder: Path, run: Run, layout: str, *, at: int | None = None, meanwhile: bool = False) -> None:
    """Train for some steps and save; beside it, what there is, for comparison. at: after how many, if not the half."""
    training = Training(run, layout).steps(0, middle(run) if at is None else at)
    if run.absent or at == 0:
        training.optimizer.make_state()
    seen = snapshot(training)
    write(training, folder / "checkpoint", meanwhile=meanwhile)
    if torch.distributed.get_rank() == 0:
        torch.save(seen, folder / "seen.pt")
    torch.distributed.barrier()


def resume(
    folder: Path, run: Run, layout: str, *, at: int | None = None, begun: int = 0, exact: bool = False
) -> list[str]:
    """What of a checkpoint is not as it was saved, or goes on otherwise than without an interruption.

    begun: how many steps were taken before it is read. exact: compared to the bit, with the same layout.
    """
    training = Training(run, layout, seed=7).steps(0, begun)  # nothing is right before it is loaded
    read(training, folder / "checkpoint")
    found = differing(torch.load(folder / "seen.pt", weights_only=False), snapshot(training))
    training.steps(middle(run) if at is None else at, len(run.rates))
    alone = Training(run, layout if exact else "plain")
    alone.steps(0, len(run.rates))
    found += differing(snapshot(alone), snapshot(training)) if exact else list(unequal(alone, training))
    return [*found, *misplaced(training)]


def resumed(folder: Path, run: Run, before: str, after: str, *, meanwhile: bool = False, **how: Any) -> list[str]:
    """The same where as many ranks resume as have saved."""
    save(folder, run, before, at=how.get("at"), meanwhile=meanwhile)
    return resume(folder, run, after, **how)


def told(action: Callable[[], Any]) -> str:
    try:
        action()
    except BaseException as error:  # what the engine wraps the errors of ranks in is none of Exception
        return f"{type(error).__name__}: {error}"
    return ""


def misfit(folder: Path, saved: Run, run: Run) -> tuple[str, str]:
    """What is said of a checkpoint that does not fit, read from files and loaded directly."""
    save(folder, saved, "FSDP2")
    state = Training(saved, "FSDP2").steps(0, middle(saved)).optimizer.state_dict()
    by_files, directly = Training(run, "FSDP2"), Training(run, "FSDP2")
    return told(lambda: read(by_files, folder / "checkpoint")), told(lambda: directly.optimizer.load_state_dict(state))


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
