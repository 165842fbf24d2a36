"""What an optimizer remembers of its parameters, and how that is saved and restored."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from thalweg.arrays import Shape, State
from thalweg.errors import OptionError, ParameterError, StateError
from thalweg.exchange import check_exchanged, pack_state
from thalweg.kernels.cpu.tables import Operand
from thalweg.numpy.arrays import Arr, Name, dtype_name
from thalweg.numpy.checkpoints import read_file, read_state, write_file
from thalweg.rules import Rule
from thalweg.settings import Handling, Setting, Settings
from thalweg.storage import ACCUMULATED, SPIKES, arithmetic


@dataclass
class Tracked:
    """What the optimizer knows of one parameter."""

    state: State[Arr]
    step: int = 0
    #: None until the parameter is seen (again): after its state was loaded, or options changed.
    setting: Setting | None = None
    #: The place of its rule among those of a mixture.
    place: int = 0
    #: What has made the state; None if a file did not say.
    made_by: type[Rule] | None = None
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

    skipped: int = 0
    #: The sum of gradients that wait for a step.
    accumulated: Arr | None = None

    def accumulate(self, gradient: Arr, weights: Arr) -> None:
        """Add a gradient in the precision in which its parameter is computed."""
        if self.accumulated is None:
            self.accumulated = gradient.astype(arithmetic(dtype_name(weights)))
        else:
            self.accumulated += gradient


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


class Memory:
    """State by parameter, and the count of iterations."""

    #: What it steps by.
    rule: ClassVar[type[Rule]]
    lr: Any
    _settings: Settings

    def __init__(self) -> None:
        self._tracked: dict[Name, Tracked] = {}
        #: Whether a state was loaded, and it is not yet known whether it has to be converted.
        self._untold = False
        #: What is kept of former norms for ``spikes``, and what the last step told of them.
        self._norms: Arr | None = None
        self._joint_figures: dict[str, Any] = {}
        #: How many calls of step wait for one that is taken.
        self._accumulated = 0
        #: How many iterations have ended, counted under ``global_step=True`` alone.
        self.iteration = 0

    @property
    def state(self) -> dict[Name, dict[str, Arr]]:
        """The state of every parameter stepped so far, under the keys of checkpoints."""
        norms = {} if self._norms is None else {SPIKES: self._norms}
        sums = {
            name: {ACCUMULATED: own.accumulated} for name, own in self._tracked.items() if own.accumulated is not None
        }
        return {
            name: {"step": np.array(known.step), **known.state, **norms, **sums.get(name, {})}
            for name, known in self._tracked.items()
        }

    @property
    def num_parameters(self) -> int:
        """How many parameters have been stepped."""
        return len(self._tracked)

    @property
    def skipped(self) -> dict[Name, int]:
        """How often each parameter was left alone by ``on_nonfinite="skip"`` or ``spikes``."""
        return {name: known.skipped for name, known in self._tracked.items()}

    def stats(self) -> dict[Name, dict[str, Any]]:
        """Statistics of the last step of each parameter: trust ratios, norms, clipping."""

        def show(value: Any) -> Any:
            array = np.asarray(value)
            return array.item() if array.size == 1 else array.squeeze()

        found = {name: {**known.stats(), **self._joint_figures} for name, known in self._tracked.items()}
        return {name: {key: show(v) for key, v in figures.items()} for name, figures in found.items()}

    def clear_state(self) -> None:
        """Forget every parameter, and the count of iterations."""
        self._tracked, self.iteration = {}, 0
        self._norms, self._joint_figures, self._accumulated = None, {}, 0

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs, as plain values and copies of arrays."""
        made_by, lr = self._told()
        packed = pack_state(made_by, copy.deepcopy(self.state), lr=lr, iteration=self.iteration)
        return {**packed, ACCUMULATED: self._accumulated} if self._accumulated else packed

    def _told(self) -> tuple[Any, Any]:
        """What a checkpoint says of the rule, or of those of a mixture by name, and of learning rates."""
        return self.rule, None if callable(self.lr) else self.lr

    def _check_maker(self, state_dict: Any) -> Mapping[Name, type[Rule]]:
        """Refuse a state of other rules; by name, which rules have made it where there are several."""
        check_exchanged(state_dict, self.rule, options=self._settings.options)
        return {}

    def _restore_rate(self, lr: Any) -> None:
        if lr is not None and not callable(self.lr):
            self.lr = lr

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state. On any error nothing is changed.

        A learning rate that was a number is restored too, unless this optimizer's is a function.
        """
        present = {name: known.state for name, known in self._tracked.items()}
        try:
            makers = self._check_maker(state_dict)
            lr, iteration, saved = read_state(state_dict, present)
            self._restore_rate(lr)  # checked there, before anything is changed
        except (OptionError, ParameterError) as error:
            raise StateError(f"this state_dict() is damaged: {error}") from None
        self._tracked = {
            name: Tracked(entries, step, made_by=makers.get(name), accumulated=beside.get(ACCUMULATED))
            for name, (step, entries, beside) in saved.items()
        }
        self._norms = next((beside[SPIKES] for *_, beside in saved.values() if SPIKES in beside), None)
        self.iteration, self._untold, self._accumulated = iteration, True, state_dict.get(ACCUMULATED, 0)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write ``state_dict()`` to an ``.npz`` or ``.safetensors`` file, without pickle."""
        write_file(path, self.state_dict())

    def load(self, path: str | os.PathLike[str]) -> None:
        """``load_state_dict`` from a file written by :meth:`save`."""
        self.load_state_dict(read_file(path))
