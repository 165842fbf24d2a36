"""The tasks that can be raced on, by name; and tasks of your own, by ``module:attribute``."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from thalweg.errors import CommandError
from thalweg.race import TASKS
from thalweg.race.task import Task, blame
from thalweg.show.arguments import suggest
from thalweg.show.modules import digest_source, import_attribute


def resolve(name: str, data: Path | None = None, device: str = "cpu") -> list[Task]:
    """The task of that name; ``valley`` has several. Tasks in torch are larger on a GPU."""
    if data is not None and name != "fashion":
        raise CommandError(f"--data is for the task 'fashion': {name!r} has its own")
    if ":" in name:
        return [own(name)]
    if name not in TASKS:
        raise CommandError(f"there is no task {name!r} (your own would be mymodule:task): {suggest(name, TASKS)}")
    if name == "fashion" and data is None:
        raise CommandError("task 'fashion' needs --data FOLDER, with the four files of Fashion-MNIST in it")
    module: Any = importlib.import_module(f"thalweg.race.tasks.{name}")
    if name == "valley":
        return list(module.tasks())
    given: dict[str, list[Any]] = {"text": [device], "fashion": [data, device]}
    return [module.task(*given.get(name, []))]


def own(reference: str) -> Task:
    """A task from a module of the user's: an ArrayTask or a ModelTask, or a function that returns one."""
    found, module = import_attribute(reference, "task", "mymodule:task", lambda value: isinstance(value, Task))
    if not isinstance(found, Task) and callable(found):
        with blame(reference, "calling it"):
            found = found()
    if not isinstance(found, Task):
        wanted = "an ArrayTask or a ModelTask of thalweg.race, or a function that returns one"
        raise CommandError(f"{reference} is a {type(found).__name__} and must be {wanted}")
    return replace(found, fingerprint=found.fingerprint + digest_source(module))
