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


def messages(run: Run, layout: str) -> list[dict[str, int]]:
    """For each step how many collectives of which kind there are."""
    listeners = [Messages() for _ in run.rates]
    stepped(run, laid_out(layout), watch=lambda step: listeners[step])
    return [dict(listener.heard) for listener in listeners]
