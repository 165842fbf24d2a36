"""What can go wrong with checkpoints over ranks, and what they are when all is well."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from world_checkpoints import ENDED, SAVED, Training, differing, read, torch, write
from world_layouts import DTensor

pytest.importorskip("torch.distributed.checkpoint")

from torch.distributed.checkpoint import async_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict

from thalweg.storage import ACCUMULATED


def layout_of(training: Training) -> dict[str, Any]:
    """Keys of all state, with shapes, dtypes and how they lie over ranks."""
    return {
        f"{name}.{key}": (tuple(x.shape), x.dtype, str(x.placements) if isinstance(x, DTensor) else "plain")
        for name, p in training.own.items()
        for key, x in training.optimizer.state.get(p, {}).items()
    }


def state_by_a_step(case: str, layout: str) -> list[str]:
    """The step that a checkpoint loader makes: what it moves, and what is missing after it.

    It counts: as a first step, or as the first of several whose gradients are accumulated.
    """
    training, other = Training(case, layout), Training(case, layout)
    before = training.snapshot()
    get_optimizer_state_dict(training.model, training.optimizer)
    after = training.snapshot()
    for group in after["groups"]:
        group.pop(ACCUMULATED, None)
    found = list(differing(before["params"], after["params"])) + list(differing(before["groups"], after["groups"]))
    other.steps(0, SAVED)
    return found + list(differing(layout_of(other), layout_of(training)))


def state_when_asked(case: str, layout: str) -> list[str]:
    """State made before the first step: it is that of other steps, and changes none of them."""
    training, other = Training(case, layout), Training(case, layout)
    training.optimizer.make_state()
    made = layout_of(training)
    found = [f"{name}: {s['step']}" for name, s in training.snapshot()["state"].items() if s["step"] != 0]
    get_optimizer_state_dict(training.model, training.optimizer)  # finds it, and takes no step
    training.steps(0, SAVED)
    other.steps(0, SAVED)
    return found + list(differing(made, layout_of(other))) + list(differing(other.snapshot(), training.snapshot()))


def save_before_steps(folder: Path, case: str, layout: str) -> None:
    training = Training(case, layout)
    training.optimizer.make_state()
    write(training, folder, "nested")


def from_the_beginning(folder: Path, case: str, layout: str) -> list[str]:
    """What differs, to the last bit, if a run begins with a checkpoint that was saved before the first step."""
    training, other = Training(case, layout, seed=7), Training(case, layout)
    read(training, folder, "nested")
    training.steps(0, SAVED)
    other.steps(0, SAVED)
    return list(differing(other.snapshot(), training.snapshot()))


def same_bits(folder: Path, case: str, layout: str, dtype: str, **options: Any) -> list[str]:
    """What differs, to the last bit, between a run that is interrupted and one that is not, on the same ranks."""
    first, again = (Training(case, layout, dtype=dtype, seed=seed, **options) for seed in (0, 7))
    first.steps(0, SAVED)
    write(first, folder, "nested")
    first.steps(SAVED, ENDED)
    again.steps(0, 2)  # what it has learned by itself is forgotten
    read(again, folder, "nested")
    again.steps(SAVED, ENDED)
    return list(differing(first.snapshot(), again.snapshot()))


def saved_while_training(folder: Path, case: str, layout: str) -> list[str]:
    """A checkpoint that is written while further steps are taken has what there was when it was asked for."""
    training = Training(case, layout)
    training.steps(0, SAVED)
    wanted = training.snapshot()
    model, optim = get_state_dict(training.model, training.optimizer)
    own_group = torch.distributed.new_group(backend="gloo")  # its messages must not meet those of the steps
    future: Any = async_save({"model": model, "optim": optim}, checkpoint_id=folder, process_group=own_group)
    training.steps(SAVED, ENDED)
    future.result()
    again = Training(case, layout, seed=7)
    read(again, folder, "nested")
    found = list(differing(wanted, again.snapshot()))
    again.steps(SAVED, ENDED)
    return found + list(differing(training.snapshot(), again.snapshot()))


def told(action: Callable[[], Any]) -> str:
    try:
        action()
    except BaseException as error:  # what the engine wraps the errors of ranks in is none of Exception
        return f"{type(error).__name__}: {error}"
    return ""


def stepped_late(folder: Path, case: str, layout: str, way: str) -> list[str]:
    """What differs where one parameter has had no gradient yet when the checkpoint is saved."""
    first, again = Training(case, layout), Training(case, layout, seed=7)
    first.steps(0, SAVED, absent=["wide.weight"])
    first.optimizer.make_state()
    write(first, folder, way)
    first.steps(SAVED, ENDED)
    read(again, folder, way)
    again.steps(SAVED, ENDED)
    return list(differing(first.snapshot(), again.snapshot()))


def misfit(folder: Path, case: str, layout: str, way: str, **made: Any) -> str:
    """What is said of a checkpoint that does not fit."""
    training = Training(case, layout, **made)
    return told(lambda: read(training, folder / "checkpoint", way))


def misfit_directly(saved: str, case: str, layout: str) -> tuple[str, list[str]]:
    """What is said, and changed, where ``load_state_dict`` does not find what it needs."""
    first, training = Training(saved, layout), Training(case, layout, seed=7)
    first.steps(0, SAVED)
    training.steps(0, 1)
    before = training.snapshot()
    said = told(lambda: training.optimizer.load_state_dict(first.optimizer.state_dict()))
    found = list(differing(before, training.snapshot()))
    training.steps(1, 2)
    return said, found


def loaded_directly(case: str, before: str, after: str) -> list[str]:
    """By ``load_state_dict`` alone, from a state that lies otherwise."""
    first, again = Training(case, before), Training(case, after)
    first.steps(0, SAVED)
    again.steps(0, 1)
    expected = layout_of(again)
    wanted = first.snapshot()["state"]
    again.optimizer.load_state_dict(first.optimizer.state_dict())
    found = list(differing(wanted, again.snapshot()["state"]))
    return found + list(differing(expected, layout_of(again)))
