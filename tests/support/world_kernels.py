"""Kron's kernels on owners of whole tensors: what they were given, and what came of it beside one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tolerances import SPACE  # noqa: E402
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook  # noqa: E402
from world_layouts import layout as laid_out  # noqa: E402
from world_layouts import plain  # noqa: E402
from world_steps import Run, in_one_process, misplaced, stepped, unequal  # noqa: E402


def batches_of(optimizer: Any) -> list[tuple[str, ...]]:
    """What this rank's kernels have whitened together."""
    kernels = optimizer._engines["lists"].owners.whitening.kernels
    return [] if kernels is None else list(kernels.known)


def by_owners(
    run: Run, layout: str, *, beside_kernels: bool = False, event: str = ""
) -> tuple[list[str], list[tuple[str, ...]], str]:
    """Differences to one process, what this rank's kernels were given, and the engine.

    beside_kernels: that one process has the same kernels; else it has the rule. event: what happens on the way.
    """
    watch = EVENTS[event]
    if beside_kernels or watch is not nothing:
        engine = run.engine if beside_kernels else "reference"
        wanted = stepped(replace(run, engine=engine, interpreted=beside_kernels), plain, watch)
        assert wanted.optimizer.engine == engine
    else:
        wanted = in_one_process(run)
    got = stepped(run, laid_out(layout), watch)
    found = [*unequal(run, wanted, got, SPACE["float32"]), *misplaced(got)]
    if got.errors != wanted.errors:
        found.append(f"errors are {got.errors}, and in one process {wanted.errors}")
    if (got.optimizer.skipped, got.optimizer.nonfinite()) != (wanted.optimizer.skipped, wanted.optimizer.nonfinite()):
        found.append("other steps are skipped than in one process")
    return found, batches_of(got.optimizer), got.optimizer.engine


def nothing(step: int) -> AbstractContextManager[Any]:
    return nullcontext()


@contextmanager
def reloaded(step: int) -> Iterator[None]:
    """State is saved and loaded after the first step."""
    seen = []

    def reload(optimizer: Any, *_: Any) -> None:
        seen.append(optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())))

    handle = register_optimizer_step_post_hook(reload)
    try:
        yield
    finally:
        handle.remove()
    assert len(seen) == 1


@contextmanager
def refused(step: int) -> Iterator[None]:
    """A GradScaler has found what is not finite, and says so."""
    seen = []

    def refuse(optimizer: Any, *_: Any) -> None:
        optimizer.found_inf = torch.ones(())
        seen.append(optimizer)

    handle = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()
        for optimizer in seen:
            del optimizer.found_inf
    assert len(seen) == 1


EVENTS: Mapping[str, Callable[[int], AbstractContextManager[Any]]] = {
    "": nothing,
    "state is loaded": lambda step: reloaded(step) if step == 0 else nullcontext(),
    "a step is refused": lambda step: refused(step) if step == 1 else nullcontext(),
}
