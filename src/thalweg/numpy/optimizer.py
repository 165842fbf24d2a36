"""The optimizer for raw arrays: its options, its steps, its state."""

from __future__ import annotations

import copy
import itertools
import math
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, TypeAlias, TypeVar, cast

import numpy as np

from thalweg.arrays import Shape
from thalweg.boundary import Advance, seen
from thalweg.errors import NonFiniteError, OptionError, ParameterError, StateError, UnusedOverrideWarning
from thalweg.exchange import check_exchanged, pack_state, warn_converted
from thalweg.explain import Explanation, Row, explain_parameter
from thalweg.given import Overrides, Standard, as_written, check_overrides, plain
from thalweg.numpy.arrays import (
    Arr,
    Name,
    Rate,
    address,
    check_apart,
    check_array,
    check_plain,
    check_served,
    checked_name,
    checked_pair,
    checked_rate,
    dtype_name,
    is_aliased,
    narrow_rms,
    pairs,
    span,
)
from thalweg.numpy.checkpoints import read_file, read_state, write_file
from thalweg.numpy.engines import (
    Engine,
    Figures,
    Job,
    Native,
    Tracked,
    check_engine,
    divide,
    normal_of,
    squares_of,
)
from thalweg.rules import Rule
from thalweg.rules.around import NO_AVERAGE, Wrapped, keeps_average
from thalweg.rules.checks import check_flag, check_number
from thalweg.rules.spikes import judge
from thalweg.settings import Settings, option_names
from thalweg.spaces import numpy as xp
from thalweg.storage import SPIKES, check_fits, completed, converted, first_state
from thalweg.trial import check_update

Self = TypeVar("Self", bound="Optimizer")
Params: TypeAlias = Mapping[str, Arr] | Sequence[Arr]


class Optimizer:
    """Steps numpy arrays in place, name by name or a whole model at once.

    Every optimizer derives from it; its methods are theirs. Override :meth:`lr_scale` for
    learning rates by name that a list of patterns cannot express.
    """

    #: What it steps by.
    rule: ClassVar[type[Rule]]
    _tracked: dict[Name, Tracked]
    #: What is kept of former norms for ``spikes``, and what the last step told of them.
    _norms: Arr | None
    _joint_figures: dict[str, Any]
    #: Whether a state was loaded, and nothing was told of how it was kept.
    _is_loaded: bool

    def __init__(
        self,
        lr: Rate,
        *,
        variant: str | None = None,
        overrides: Overrides = (),
        global_step: bool = False,
        engine: Engine = "auto",
        **options: Any,
    ) -> None:
        settings = Settings(self.rule, options, variant, check_overrides(overrides))
        check_served(settings)
        self._settings, self._lr = settings, checked_rate(lr, settings)
        check_flag("global_step", global_step)
        check_engine(engine)
        self._global_step, self._wanted_engine = global_step, engine
        self._engines_used: set[str] = set()
        self._native = Native()
        #: Whether averages are in the place of parameters.
        self._is_evaluated = False
        #: The places of overrides that match a parameter, and whether those that match none have been told.
        self._used: set[int] = set()
        self._is_reported = False
        if not hasattr(self, "_tracked"):  # a copy whose options are changed goes on with its state
            self.clear_state()

    # ---- options

    @property
    def lr(self) -> Any:
        """The learning rate: a number, a function of the step, or None for the rule's own."""
        return self._lr

    @lr.setter
    def lr(self, value: Rate) -> None:
        self._lr = checked_rate(value, self._settings)

    @property
    def options(self) -> dict[str, Any]:
        """Every option of the rule and around it, as it holds where no override applies."""
        return self._settings.options

    def with_options(self: Self, **options: Any) -> Self:
        """A copy, state included, with some options changed; ``with_lr(x)`` and the like do the same for one."""
        changed, settings = self.copy(), self._settings
        beside = dict(global_step=self._global_step, engine=self._wanted_engine)
        given: Any = dict(lr=self.lr, variant=settings.variant, overrides=settings.overrides, **beside)
        Optimizer.__init__(changed, **{**given, **settings.given, **options})
        for tracked in changed._tracked.values():
            tracked.setting = tracked.unserved = None
        return changed

    def __getattr__(self, name: str) -> Callable[..., Any]:
        option = name.removeprefix("with_")
        if option != name and option in self._option_names():
            return lambda *value: self.with_options(**{option: value[0] if len(value) == 1 else value})
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *(f"with_{name}" for name in self._option_names())]

    def _option_names(self) -> tuple[str, ...]:
        return ("lr", "variant", "overrides", "global_step", "engine", *option_names(self.rule))

    def lr_scale(self, name: Name) -> float:
        """What multiplies the learning rate of a parameter. Made to be overridden."""
        return 1.0

    # ---- stepping

    @property
    def engine(self) -> str:
        """The engines that the last step used, or the one that was asked for."""
        return " + ".join(sorted(self._engines_used)) or self._wanted_engine

    def update(
        self, name: Name, weights: Arr, gradient: Arr | None, *, shape: Shape | None = None, lr_scale: float = 1.0
    ) -> None:
        """Step one parameter in place. A gradient of None leaves it alone.

        ``shape`` says how a flat buffer is to be seen: without it, one of one axis counts as a tensor of unknown shape
        and not as a vector, so that ``exempt="vectors"`` leaves it alone. ``lr_scale`` multiplies the learning rate.
        """
        if gradient is None:
            return
        handling = self._settings.base.handling
        if handling.needs_norm:
            option = "spikes" if handling.max_grad_norm is None else "max_grad_norm"
            raise OptionError(f"{option} needs all gradients of a step at once: use step(params, grads)")
        is_raw = shape is None and np.ndim(weights) == 1
        self._run([self._job(name, weights, gradient, shape, lr_scale, is_raw=is_raw)])

    def step(self, params: Params, grads: Mapping[str, Arr | None] | Sequence[Arr | None]) -> None:
        """Step a whole model in place, given as two mappings by name or two sequences.

        Parameters without a gradient (None, or no entry in the mapping) are left alone. The shape of each is its own:
        an array of one axis is a vector.
        """
        jobs = [self._job(name, weights, gradient) for name, weights, gradient in pairs(params, grads)]
        check_apart({job.name: job.place for job in jobs})
        if not self._is_reported and len(jobs) == len(params):
            self._is_reported = True
            if unused := self._unused_overrides(self._used):
                told = f"overrides that match no parameter: {', '.join(map(repr, unused))}"
                warnings.warn(told, UnusedOverrideWarning, stacklevel=2)
        if jobs and self._settings.base.handling.needs_norm:
            self._run_by_norm(jobs)
        else:
            self._run(jobs)
        self.end_iteration()

    def end_iteration(self) -> None:
        """Say that every parameter has had its :meth:`update`.

        Each parameter counts its own steps, so that nothing depends on this, but under
        ``global_step=True``: there it begins the next step of all. :meth:`step` calls it itself.
        """
        self.iteration += self._global_step

    def _job(
        self, name: Name, weights: Any, gradient: Any, shape: Any = None, lr_scale: Any = 1.0, *, is_raw: bool = False
    ) -> Job:
        """A parameter and its gradient, checked, with the numbers of its step."""
        name = checked_name(name)
        weights, gradient = checked_pair(name, weights, gradient, shape)
        tracked = self._tracked.get(name) or Tracked({})
        if tracked.shape not in (None, weights.shape):
            raise ParameterError(
                f"parameter {name!r} has shape {weights.shape} and had {tracked.shape} before: "
                "a name must keep its shape"
            )
        if tracked.setting is None or tracked.is_raw != is_raw:
            self._resolve(name, weights, tracked, is_raw)
        setting: Any = tracked.setting
        t = self.iteration + 1 if self._global_step else tracked.step + 1
        lr = plain(self.lr(t)) if callable(self.lr) else self.lr
        scales = {"lr_scale": lr_scale, "lr_scale(name)": self.lr_scale(name)}
        try:
            check_plain("lr", lr)
            setting.rule.validate_lr(lr)
            for option, value in scales.items():
                check_plain(option, value)
                check_number(option, value, low=0.0)
            rule = setting.rule_at(t)
            for option in setting.scheduled:
                check_plain(option, getattr(rule, option))
        except OptionError as error:
            raise OptionError(f"parameter {name!r}, step {t}: {error}") from None
        scale = plain(math.prod((setting.lr_scale, *scales.values())))
        places = span(weights, address(weights)), span(gradient, address(gradient))
        return Job(name, weights, gradient, *places, tracked, rule, setting.handling, t, lr, scale)

    def _resolve(self, name: Name, weights: Arr, tracked: Tracked, is_raw: bool) -> None:
        """Find what holds for a parameter that is new, or whose options have changed, and fit its state to that."""
        shape = (1, weights.size) if is_raw else None
        setting, matched = self._settings.of(str(name), weights, shape=shape)
        setting.rule.check_shape(name, weights.shape)
        check_update(setting.rule, weights.shape)
        with np.errstate(all="ignore"):  # some processors find a signalling NaN invalid
            if tracked.step == 0 and not tracked.state:
                before = first_state(xp, setting.rule, setting.handling, weights)
            else:
                before = completed(xp, name, setting.rule, setting.handling, weights, tracked.state)
            check_fits(xp, name, setting.rule, weights.shape, before)
            # kept as these options have it, whatever it was saved in
            state = converted(xp, setting.rule, setting.handling, weights, before)
        if self._is_loaded and state.keys() != before.keys():
            self._is_loaded = False
            warn_converted(name, before, state)
        self._used.update(matched)
        tracked.state, tracked.operand, tracked.unserved = state, None, None
        tracked.setting, tracked.shape, tracked.is_raw = setting, weights.shape, is_raw

    def _run_by_norm(self, jobs: Sequence[Job]) -> None:
        """Step a whole model as the joint norm of its gradients decides."""
        handling, scale = self._settings.base.handling, None
        norm, guard = self._joint_norm(jobs), handling.guard
        if handling.max_grad_norm is not None:
            scale = 1 / max(1.0, norm / handling.max_grad_norm) if math.isfinite(norm) else math.nan
        if guard is None:
            self._run(jobs, scale)
            return
        norms = np.zeros(guard.kept_shape) if self._norms is None else self._norms
        if norms.shape != guard.kept_shape:
            raise StateError(
                f"spikes has window={guard.window}, and the norms of {norms.size - 1} steps are kept: use that window, "
                "or drop them with clear_state()"
            )
        with np.errstate(all="ignore"):
            judgement = judge(xp, guard, np.array([norm]), norms)
        is_skipped = guard.action == "skip" and judgement.is_spike.item()
        if guard.action != "skip":
            clipped = judgement.scale.item()
            scale = clipped if scale is None else min(scale, clipped)
        self._run([] if is_skipped else jobs, scale)
        self._norms, self._joint_figures = judgement.kept, judgement.figures
        if is_skipped:
            for job in jobs:
                self._commit(job, job.tracked.stats, is_taken=False)

    def _joint_norm(self, jobs: Sequence[Job]) -> float:
        squares = squares_of([job.gradient for job in jobs], self._wanted_engine)
        norm = math.sqrt(sum(squares))
        if not math.isfinite(norm) and self._settings.base.handling.on_nonfinite == "raise":
            guilty = [job.name for job, square in zip(jobs, squares, strict=True) if not math.isfinite(square)]
            raise NonFiniteError(f"these gradients are not finite, or too large to be squared: {guilty}")
        return norm

    def _run(self, jobs: Sequence[Job], scale: float | None = None) -> None:
        """Step parameters by the engine that was asked for. scale: multiplies all gradients."""
        if self._is_evaluated:
            raise OptionError("a step within averaged(): leave it first, since parameters are averages there")
        with self._native.lock:
            new = [job.name for job in jobs if job.name not in self._tracked]
            aliased = len(jobs) > 1 and is_aliased([job.place for job in jobs], [job.gradient_place for job in jobs])
            native, others = divide(jobs, self._wanted_engine, aliased)
            self._engines_used = {name for name, used in (("fused", native), ("reference", others)) if used}
            # numpy does products best, of noise by native code
            whole, native = ([job for job in native if job.rule.needs_whole is wanted] for wanted in (True, False))
            computed: Iterable[tuple[Job, Advance]] = itertools.chain(
                ((job, job.compute(scale)) for job in others),
                ((job, job.compute(scale, partial(normal_of, job))) for job in whole),
            )
            taken, write = self._native.measure(native, scale)
            must_be_finite = self._settings.base.handling.on_nonfinite == "raise"
            if must_be_finite:
                for job, is_finite in zip(native, taken, strict=True):
                    job.check_finite(is_finite)
            if aliased or must_be_finite:
                # nothing is written before everything has been read, and is known to be finite
                computed = list(computed)
            for job, stats, is_taken in zip(native, write(), taken, strict=True):
                self._commit(job, stats, is_taken)
            for job, result in computed:
                is_taken = result.finite is None or bool(result.finite)
                if is_taken:
                    job.weights[...] = result.p
                    job.tracked.state, job.tracked.operand = result.state, None
                self._commit(job, partial(dict, result.stats), is_taken)
            for name in new:  # in the order in which they came, whichever engine has stepped them
                self._tracked[name] = self._tracked.pop(name)

    def _commit(self, job: Job, stats: Figures, is_taken: bool) -> None:
        tracked = self._tracked[job.name] = job.tracked
        tracked.stats = stats
        if is_taken:
            tracked.step = job.t
        else:
            tracked.skipped += 1

    # ---- what it would do, and what it has done

    @contextmanager
    def averaged(self, params: Params) -> Iterator[None]:
        """Evaluate averages: within, they are in the place of these arrays, which come back to the bit after it.

        They are those of ``averaged`` or ``schedule_free``. Arrays that have none are as they are.
        """
        replaced = []
        for name, weights, _ in pairs(params, params):
            tracked = self._tracked.get(name, Tracked({}))
            if tracked.setting is not None and keeps_average(tracked.setting.rule):
                rule = cast(Wrapped, tracked.setting.rule_at(tracked.step + 1))
                average = rule.evaluate_at(xp, tracked.state, seen(xp, weights, tracked.state), tracked.step)
                replaced.append((weights, weights.copy(), average))
        if not replaced:
            raise OptionError(f"{NO_AVERAGE}; and take a step")
        try:
            for weights, _, average in replaced:
                weights[...] = average
            self._is_evaluated = True
            yield
        finally:
            self._is_evaluated = False
            for weights, before, _ in replaced:
                weights[...] = before

    def explain(self, params: Params) -> Explanation:
        """How each parameter of a model will be treated, what its state will cost, and what looks like a mistake.

        No state is made.
        """
        rows, used = list[Row](), set[int]()
        named: Mapping[Any, Arr] = params if isinstance(params, Mapping) else dict(enumerate(params))
        lr = plain(self.lr(1)) if callable(self.lr) else self.lr
        for name, weights in named.items():
            check_array(f"parameter {checked_name(name)!r}", weights)
            setting, matched = self._settings.of(str(name), weights)
            used.update(matched)
            setting = replace(setting, lr_scale=setting.lr_scale * self.lr_scale(name))
            facts = str(name), weights.shape, dtype_name(weights), setting
            rows.append(explain_parameter(*facts, lr=lr, rms=narrow_rms(weights), counter_bytes=0))
        return Explanation(rows, self._unused_overrides(used))

    def _unused_overrides(self, used: Collection[int]) -> list[Any]:
        """The patterns at all places but these; "standard" may match none."""
        overrides = enumerate(self._settings.overrides)
        return [p for place, (p, _) in overrides if place not in used and not isinstance(p, Standard)]

    def stats(self) -> dict[Name, dict[str, Any]]:
        """Statistics of the last step of each parameter: trust ratios, norms, clipping."""

        def show(value: Any) -> Any:
            array = np.asarray(value)
            return array.item() if array.size == 1 else array.squeeze()

        figures = {name: {**tracked.stats(), **self._joint_figures} for name, tracked in self._tracked.items()}
        return {name: {key: show(value) for key, value in told.items()} for name, told in figures.items()}

    # ---- state

    @property
    def state(self) -> dict[Name, dict[str, Arr]]:
        """The state of every parameter stepped so far, under the keys of checkpoints."""
        norms = {} if self._norms is None else {SPIKES: self._norms}
        return {name: {"step": np.array(known.step), **known.state, **norms} for name, known in self._tracked.items()}

    @property
    def num_parameters(self) -> int:
        """How many parameters have been stepped."""
        return len(self._tracked)

    @property
    def skipped(self) -> dict[Name, int]:
        """How often each parameter was left alone by ``on_nonfinite="skip"`` or ``spikes``."""
        return {name: tracked.skipped for name, tracked in self._tracked.items()}

    def clear_state(self) -> None:
        """Forget every parameter, and the count of iterations."""
        self._tracked, self._norms, self._joint_figures, self._is_loaded = {}, None, {}, False
        #: How many iterations have ended, counted under ``global_step=True`` alone.
        self.iteration = 0

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs, as plain values and copies of arrays."""
        lr = None if callable(self.lr) else self.lr
        return pack_state(self.rule, copy.deepcopy(self.state), lr=lr, iteration=self.iteration)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state. On any error nothing is changed.

        A learning rate that was a number is restored too, unless this optimizer's is a function.
        """
        check_exchanged(state_dict, self.rule, options=self.options)
        try:
            states, norms = read_state(state_dict, {name: tracked.state for name, tracked in self._tracked.items()})
            if state_dict["lr"] is not None and not callable(self.lr):
                self.lr = state_dict["lr"]  # checked there, before anything is changed
        except (OptionError, ParameterError) as error:
            raise StateError(f"this state_dict() is damaged: {error}") from None
        self._tracked = {name: Tracked(state, step) for name, (step, state) in states.items()}
        self._norms, self.iteration, self._is_loaded = norms, int(state_dict["iteration"]), True

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write ``state_dict()`` to an ``.npz`` file, without pickle."""
        write_file(path, self.state_dict())

    def load(self, path: str | os.PathLike[str]) -> None:
        """``load_state_dict`` from a file written by :meth:`save`."""
        self.load_state_dict(read_file(path))

    # ---- copies

    def copy(self: Self) -> Self:
        """An independent optimizer with the same options and state."""
        return copy.deepcopy(self)

    __copy__ = copy

    def __repr__(self) -> str:
        settings, overrides = self._settings, as_written(self._settings.overrides)
        beside = dict(overrides=overrides, global_step=self._global_step, engine=self._wanted_engine)
        usual: dict[str, Any] = dict(lr=None, variant=None, overrides=[], global_step=False, engine="auto")
        given = dict(lr=self.lr, variant=settings.variant, **settings.changed(), **beside)
        told = [
            f"{name}={readable(value)}" for name, value in given.items() if value != usual.get(name, NotImplemented)
        ]
        return f"{type(self).__name__}({', '.join(told)})"


def readable(value: Any) -> str:
    """A representation that Python reads back."""
    if isinstance(value, (list, tuple)):
        inner = ", ".join(map(readable, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' * (len(value) == 1)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {readable(v)}" for key, v in value.items()) + "}"
    return f"float('{value}')" if isinstance(value, float) and math.isinf(value) else repr(value)
