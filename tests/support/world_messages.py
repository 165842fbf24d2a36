"""What ranks send one another in a step, heard below whichever function sends it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode
from world_layouts import layout as laid_out
from world_steps import Run, stepped


class Messages(TorchDispatchMode):
    """Counts collectives by name."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional") and "wait" not in func.__name__:
            self.heard[func.__name__.split(".")[0].strip("_")] += 1
        return func(*args, **(kwargs or {}))


#: In a step, for each group of ranks that share a parameter. Kron's are for teams, which may span several groups.
EACH = {
    "LARS": {"allreduce": 1},
    "LAMB": {"allreduce": 1},
    "MARS": {"allreduce": 2},
    "Adafactor": {"allreduce": 2},
    "Muon": {"alltoall_base": 2},
    "Kron": {"alltoall_base": 2},
    "SOAP": {"alltoall_base": 2},
    "kron_and_others": {"alltoall_base": 2, "allreduce": 2},
}
#: How many groups of ranks share a parameter; one unless told. Those of "meshes" are a line, rows and columns.
GROUPS = {
    "plain": 0,
    "copies": 0,
    "copies of copies": 0,
    "two axes": 2,
    "two axes reversed": 2,
    "first axis twice": 2,
    "last axis twice": 2,
    "strided": 2,
    "meshes": 3,
}


def messages(run: Run, layout: str) -> list[dict[str, int]]:
    """For each step how many collectives of which kind there are."""
    listeners = [Messages() for _ in run.rates]
    stepped(run, laid_out(layout), watch=lambda step: listeners[step])
    return [dict(listener.heard) for listener in listeners]
