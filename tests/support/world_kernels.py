"""Kernels on what ranks hold: what they were given, when steps are sorted, and what came of it beside one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tolerances import SPACE, WORLD  # noqa: E402
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook  # noqa: E402
from world_layouts import layout as laid_out  # noqa: E402
from world_layouts import plain  # noqa: E402
from world_steps import Run, in_one_process, local, misplaced, stepped, unequal  # noqa: E402

import thalweg.torch.step.buckets as sorting  # noqa: E402


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


# ---- steps that are like the one before


def times_sorted(run: Run, layout: str, exchange_after: int | None = None) -> tuple[list[int], list[str]]:
    """In which steps parameters were sorted, and differences to one process.

    exchange_after: a step after which the shards of all parameters are moved to other memory, as FSDP2 does.
    """
    seen: list[int] = []
    whole = sorting.Sorter.sort
    now = [0]

    def sort(self: Any, optimizer: Any, *given: Any, **named: Any) -> Any:
        seen.append(now[0])
        if exchange_after is not None and now[0] == exchange_after:
            exchanged.append(optimizer)
        return whole(self, optimizer, *given, **named)

    exchanged: list[Any] = []

    @contextmanager
    def watch(step: int) -> Any:
        now[0] = step
        yield
        if step == exchange_after:
            for group in exchanged[0].param_groups:
                for p in group["params"]:
                    p._local_tensor = p._local_tensor.clone()

    sorting.Sorter.sort = sort  # type: ignore[method-assign]
    try:
        got = stepped(run, laid_out(layout), watch)
    finally:
        sorting.Sorter.sort = whole  # type: ignore[method-assign]
    return seen, list(unequal(run, in_one_process(run), got, WORLD[run.dtype]))


def replayed(run: Run, layout: str) -> tuple[int, list[str]]:
    """How many graphs a step was recorded in, and what differs from launches, bit by bit."""
    outcomes = []
    for replays in "01":
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("THALWEG_REPLAY", replays)
            outcomes.append(stepped(run, laid_out(layout)))
    launched, got = outcomes
    pairs = {name: (local(p), local(got.params[name])) for name, p in launched.params.items()}
    for name, state in launched.states.items():
        pairs |= {f"{name}.{key}": (local(x), local(got.states[name][key])) for key, x in state.items()}
    runs = [own for step in got.optimizer._steps.values() for own, _ in step.runs.runs]
    graphs = [len(each.graphs) for own in runs for each in own.replay.known.values() if not isinstance(each, int)]
    told, others = (outcome.optimizer.stats() for outcome in outcomes)
    differing = [name for name, (one, other) in pairs.items() if not torch.equal(one, other)]
    return max(graphs, default=0), [*differing, *(f"stats of {name}" for name in told if told[name] != others[name])]
