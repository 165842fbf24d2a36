"""What ranks send one another in a step, heard below whichever function sends it, and what replicas share."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from world_steps import Run, local, stepped


class Message(NamedTuple):
    kind: str
    dtype: str
    #: Of all that this rank hands over.
    nbytes: int


class Messages(TorchDispatchMode):
    """Notes collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[Message] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional") and "wait" not in func.__name__:
            kind = func.__name__.split(".")[0].strip("_")
            first, *others = (x for x in tree_leaves(args) if isinstance(x, torch.Tensor))
            sent = others[0] if kind == "alltoall_base" else first
            self.heard.append(Message(kind, str(sent.dtype), sent.nbytes))
        return func(*args, **(kwargs or {}))


def messages(run: Run, layout: str) -> list[list[Message]]:
    """Those of each step."""
    listeners = [Messages() for _ in run.rates]
    stepped(run, layout, watch=lambda step: listeners[step])
    return [listener.heard for listener in listeners]


def counts(run: Run, layout: str) -> list[dict[str, int]]:
    """For each step how many collectives of which kind there are."""
    return [dict(Counter(message.kind for message in heard)) for heard in messages(run, layout)]


# ---- replicas


def held(run: Run, layout: str) -> list[Any]:
    """All numbers that this rank has after a run: of parameters, and of state."""
    got = stepped(run, layout)
    return [local(x).tolist() for x in (*got.params.values(), *(x for s in got.states.values() for x in s.values()))]


def errors_without_a_gradient(run: Run) -> list[str]:
    """The errors of a run in which all ranks but the first have no gradient of the last parameter."""
    absent = {0: run.names[-1:]} if torch.distributed.get_rank() else {}
    return stepped(replace(run, absent=absent), "plain").errors


# ---- launches that are recorded


def replayed(run: Run, layout: str) -> tuple[int, list[str]]:
    """How many graphs a step was recorded in, and what differs from launches, bit by bit."""
    outcomes = []
    for replays in "01":
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("THALWEG_REPLAY", replays)
            outcomes.append(stepped(run, layout))
    launched, got = outcomes
    pairs = {name: (local(p), local(got.params[name])) for name, p in launched.params.items()}
    for name, state in launched.states.items():
        pairs |= {f"{name}.{key}": (local(x), local(got.states[name][key])) for key, x in state.items()}
    recorders = [plan.recorder for plan in got.optimizer._plans.values() if plan.recorder is not None]
    kinds = [kind for recorder in recorders for kind in recorder.known.values() if not isinstance(kind, int)]
    graphs = [sum(stage.what.startswith("replay") for stage in kind.stages) for kind in kinds]
    told, others = (outcome.optimizer.stats() for outcome in outcomes)
    differing = [name for name, (one, other) in pairs.items() if not torch.equal(one, other)]
    return max(graphs, default=0), [*differing, *(f"stats of {name}" for name in told if told[name] != others[name])]
