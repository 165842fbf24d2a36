"""The race: optimizers side by side on a task, each at the best of its learning rates.

``thalweg race`` runs it, against optimizers of other libraries too. A task of your own is an ``ArrayTask`` (numpy) or
a ``ModelTask`` (PyTorch). Only the terminal and the report need more than numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thalweg.race.contest import race as race
    from thalweg.race.task import ArrayTask as ArrayTask
    from thalweg.race.task import ModelTask as ModelTask
    from thalweg.race.task import Task as Task

#: Loaded when asked for: the command sets the number of threads before numpy is there.
PUBLIC = {"ArrayTask": "task", "ModelTask": "task", "Task": "task", "race": "contest"}


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"thalweg.race.{PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *PUBLIC]
