"""One parameter and one step of it: what is known, what was asked for, and how the rule itself computes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from thalweg.arrays import Shape, State
from thalweg.boundary import Advance, advance
from thalweg.errors import NonFiniteError
from thalweg.kernels.cpu.tables import Operand
from thalweg.numpy.arrays import Arr, Name
from thalweg.rules import Rule
from thalweg.rules.noise import tensor_id
from thalweg.settings import Handling, Setting
from thalweg.spaces import numpy as xp


@dataclass
class Tracked:
    """A parameter between its steps."""

    state: State[Arr]
    step: int = 0
    #: How often it was left alone.
    skipped: int = 0
    #: None until the parameter is seen (again): after its state was loaded, or options changed.
    setting: Setting | None = None
    shape: Shape | None = None
    #: Whether it is a buffer of one axis without a given shape: it may hold a matrix, and is not taken for a vector.
    is_raw: bool = False
    #: Tells the figures of the last step.
    stats: Callable[[], Mapping[str, Any]] = dict
    #: Why native code cannot step it, "" if it can, None: not asked yet.
    unserved: str | None = None
    #: How native code was shown it the last time.
    operand: Operand | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "operand": None}  # a copy has its own memory


class Job(NamedTuple):
    """A step of one parameter, checked and ready to be taken."""

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

    def compute(self, grad_scale: float | None, noise: Callable[[], Arr] | None = None) -> Advance:
        """The parameter and its state after the step; nothing is written."""
        scales: Any = dict(lr_scale=self.lr_scale, grad_scale=grad_scale)
        told: Any = dict(t=self.t, lr=self.lr, tensor=tensor_id(self.name), noise=noise, **scales)
        with np.errstate(all="ignore"):  # what is not finite is dealt with below, or wanted
            state = self.tracked.state
            result = advance(xp, self.rule, self.handling, self.weights, self.gradient, state, **told)
        if self.handling.on_nonfinite == "raise":
            self.check_finite(result.finite)
        return result

    def check_finite(self, is_finite: Any) -> None:
        if not is_finite:
            told = f"parameter {self.name!r}, step {self.t}"
            raise NonFiniteError(f"{told}: the gradient or the update is not finite")
