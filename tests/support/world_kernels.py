"""Kron's kernels on owners of whole tensors: what they were given, and what came of it beside one process."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest

pytest.importorskip("torch")

from tolerances import SPACE
from torch.optim.optimizer import register_optimizer_step_post_hook
from world_layouts import layout as laid_out
from world_layouts import plain
from world_steps import KNOWN, Outcome, Run, in_one_process, misplaced, stepped, unequal


def batches_of(optimizer: Any) -> list[tuple[str, ...]]:
    """What this rank's kernels have whitened together."""
    kernels = optimizer._owners.whitener.kernels
    return [] if kernels is None else list(kernels.known)


def by_owners(
    run: Run, layout: str, *, beside_kernels: bool = False, reloaded: bool = False
) -> tuple[list[str], list[tuple[str, ...]], str]:
    """Differences to one process, what this rank's kernels were given, and the engine.

    beside_kernels: that one process has the same kernels; else it has the rule. reloaded: state is saved and loaded
    after the first step.
    """
    wanted = kernels_in_one_process(run) if beside_kernels else in_one_process(run)
    got = stepped(run, laid_out(layout), reloading if reloaded else None)
    found = [*unequal(run, wanted, got, SPACE["float32"]), *misplaced(got)]
    if got.errors != wanted.errors:
        found.append(f"errors are {got.errors}, and in one process {wanted.errors}")
    if (got.optimizer.skipped, got.optimizer.nonfinite()) != (wanted.optimizer.skipped, wanted.optimizer.nonfinite()):
        found.append("other steps are skipped than in one process")
    return found, batches_of(got.optimizer), got.optimizer.engine


def kernels_in_one_process(run: Run) -> Outcome:
    key = f"kernels {run!r}"
    if key not in KNOWN:
        KNOWN[key] = stepped(run, plain)
    assert KNOWN[key].optimizer.engine == "fused"
    return KNOWN[key]


def reloading(step: int) -> AbstractContextManager[Any]:
    return reloaded_after_the_step() if step == 0 else nullcontext()


@contextmanager
def reloaded_after_the_step() -> Iterator[None]:
    def reload(optimizer: Any, *_: Any) -> None:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    handle = register_optimizer_step_post_hook(reload)
    try:
        yield
    finally:
        handle.remove()
