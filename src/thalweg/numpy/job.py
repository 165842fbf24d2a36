"""One parameter in one step."""

from __future__ import annotations

from typing import NamedTuple

from thalweg.numpy.arrays import Arr, Name
from thalweg.numpy.memory import Tracked
from thalweg.rules import Rule
from thalweg.settings import Handling


class Job(NamedTuple):
    """One parameter, checked and ready to be stepped."""

    name: Name
    weights: Arr
    gradient: Arr
    #: Where the parameter and its gradient lie: first byte, and the one behind the last.
    place: tuple[int, int]
    gradient_place: tuple[int, int]
    tracked: Tracked
    rule: Rule
    handling: Handling
    t: int
    lr: float | None
    lr_scale: float
