"""The optimizer for raw arrays: its options, its steps, its state."""

from __future__ import annotations

import copy
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, TypeAlias, TypeVar, cast

import numpy as np

from thalweg.arrays import Shape
from thalweg.boundary import Advance, seen
from thalweg.errors import NonFiniteError, OptionError, ParameterError, ResumeWarning, StateError, say_where, warn
from thalweg.exchange import pack_state, read_state
from thalweg.explain import Explanation, explain_parameter
from thalweg.given import Overrides, as_written, plain, warn_of_unused
from thalweg.numpy.arrays import (
    Arr,
    Name,
    Rate,
    apart,
    check_array,
    check_served,
    checked_name,
    checked_pair,
    checked_rate,
    pairs,
    span,
    value_at,
)
from thalweg.numpy.checkpoints import read_entries, read_file, write_file
from thalweg.numpy.engines import Engine, Figures, Job, Native, Tracked, check_engine, divide, separate, squares_of
from thalweg.rules import Rule
from thalweg.rules.around import NO_AVERAGE, Wrapped, keeps_average
from thalweg.rules.checks import check_flag, check_number
from thalweg.rules.spikes import judge, warn_if_clipped
from thalweg.settings import RuleOptions
from thalweg.spaces import numpy as xp
from thalweg.storage import (
    SPIKES,
    check_fits,
    check_norms,
    completed,
    converted,
    describe_conversion,
    first_state,
    read_count,
)
from thalweg.trial import check_update

Self = TypeVar("Self", bound="Optimizer")
Params: TypeAlias = Mapping[str, Arr] | Sequence[Arr]


class Optimizer:
    """Steps numpy arrays in place, name by name or a whole model at once.

    Every optimizer derives from it. Override :meth:`lr_scale` for learning rates by name that patterns cannot express.
    """

    #: What it steps by.
    rule: ClassVar[type[Rule]]

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
        settings = RuleOptions(self.rule, options, variant, overrides)
        check_served(settings)
        self._settings, self._lr = settings, checked_rate(lr, settings)
        check_flag("global_step", global_step)
        check_engine(engine)
        self._global_step, self._wanted_engine = global_step, engine
        self._engines_used: set[str] = set()
        self._native = Native()
        #: Whether averages are in the place of parameters.
        self._is_evaluated = False
        #: Whether the overrides that match no parameter have been told.
        self._is_reported = False
        if not hasattr(self, "_tracked"):  # a copy whose options are changed goes on with its state
            self.clear_state()

    def clear_state(self) -> None:
        """Forget every parameter, and the count of iterations."""
        self._tracked: dict[Name, Tracked] = {}
        #: What is kept of former norms for ``spikes``, and what the last step told of them.
        self._norms: Arr | None = None
        self._joint_figures: dict[str, Any] = {}
        #: How many norms were judged, and whether the user was told that they are clipped.
        self._judged, self._is_told = 0, False
        #: Whether a state was loaded, and nothing was told of how it was kept.
        self._is_loaded = False
        #: How many iterations have ended, counted under ``global_step=True`` alone.
        self.iteration = 0

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
        changed = self.copy()
        Optimizer.__init__(changed, **{**self._arguments(self._settings.given), **options})
        for tracked in changed._tracked.values():
            tracked.setting = None
        return changed

    def __getattr__(self, name: str) -> Callable[..., Any]:
        option = name.removeprefix("with_")
        if option != name and option in self._arguments(self.options):
            return lambda *value: self.with_options(**{option: value[0] if len(value) == 1 else value})
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *(f"with_{name}" for name in self._arguments(self.options))]

    def _arguments(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """What the constructor is to be called with for an optimizer like this one with these options of the rule."""
        overrides = as_written(self._settings.overrides)
        beside = dict(overrides=overrides, global_step=self._global_step, engine=self._wanted_engine)
        return dict(lr=self.lr, variant=self._settings.variant, **options, **beside)

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
        numerics = self._settings.base.numerics
        if numerics.needs_norm:
            option = "spikes" if numerics.max_grad_norm is None else "max_grad_norm"
            raise OptionError(f"{option} needs all gradients of a step at once: use step(params, grads)")
        is_raw = shape is None and np.ndim(weights) == 1
        self._run([self._job(name, weights, gradient, shape, lr_scale, is_raw=is_raw)])

    def step(self, params: Params, grads: Mapping[str, Arr | None] | Sequence[Arr | None]) -> None:
        """Step a whole model in place, given as two mappings by name or two sequences.

        Parameters without a gradient (None, or no entry in the mapping) are left alone. The shape of each is its own:
        an array of one axis is a vector.
        """
        jobs = [self._job(name, weights, gradient) for name, weights, gradient in pairs(params, grads)]
        is_first = not self._is_reported and len(jobs) == len(params)
        if is_first and self._tracked.keys() <= {job.name for job in jobs}:  # and there are no others
            self._is_reported = True
            warn_of_unused("overrides", self._settings.unused_overrides((job.name, job.weights) for job in jobs))
        if jobs and self._settings.base.numerics.needs_norm:
            self._run_by_norm(jobs)
        else:
            self._run(jobs)
        self.end_iteration()

    def end_iteration(self) -> None:
        """Begin the next step of all under ``global_step=True``, after an :meth:`update` of each; else do nothing.

        :meth:`step` calls it itself.
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
        scales = {"lr_scale": lr_scale, "lr_scale(name)": self.lr_scale(name)}
        with say_where(f"parameter {name!r}, step {t}"):
            lr = value_at("lr", self.lr, t)
            setting.rule.validate_lr(lr)
            for option, value in scales.items():
                check_number(option, value, low=0.0)
            rule = setting.rule_at(t)
            numbers = {**scales, **{option: getattr(rule, option) for option in setting.scheduled}}
            for option, value in numbers.items():
                value_at(option, value, t)
        scale = plain(math.prod((setting.lr_scale, *scales.values())))
        return Job(name, weights, gradient, span(weights), tracked, setting, rule, t, lr, scale)

    def _resolve(self, name: Name, weights: Arr, tracked: Tracked, is_raw: bool) -> None:
        """Find what holds for a parameter that is new, or whose options have changed, and fit its state to that."""
        setting, _ = self._settings.choose(str(name), weights, shape=(1, weights.size) if is_raw else None)
        setting.rule.check_shape(name, weights.shape)
        check_update(setting.rule, weights.shape)
        with np.errstate(all="ignore"):  # some processors find a signalling NaN invalid
            is_new, facts = tracked.step == 0 and not tracked.state, (setting.rule, setting.numerics, weights)
            before = first_state(xp, *facts) if is_new else completed(xp, name, *facts, tracked.state)
            check_fits(xp, name, setting.rule, weights.shape, before)
            # kept as these options have it, whatever it was saved in
            state = converted(xp, *facts, before)
        if self._is_loaded and state.keys() != before.keys():
            self._is_loaded = False
            warn(f"{describe_conversion(name, before, state)}, and all others alike", ResumeWarning)
        tracked.state, tracked.operand, tracked.refused = state, None, None
        tracked.setting, tracked.shape, tracked.is_raw = setting, weights.shape, is_raw

    def _run_by_norm(self, jobs: Sequence[Job]) -> None:
        """Step a whole model as the joint norm of its gradients decides."""
        numerics, scales, is_skipped = self._settings.base.numerics, list[float](), False
        norm, guard = self._joint_norm(jobs), numerics.guard
        if numerics.max_grad_norm is not None:
            scales.append(1 / max(1.0, norm / numerics.max_grad_norm) if math.isfinite(norm) else math.nan)
        if guard is not None:
            norms = np.zeros(guard.kept_shape) if self._norms is None else self._norms
            check_norms(guard, norms.shape)
            with np.errstate(all="ignore"):
                judgement = judge(xp, guard, np.array([norm]), norms)
            is_skipped = judgement.skips and judgement.is_spike.item()
            scales += [] if judgement.skips else [judgement.scale.item()]
        self._run([] if is_skipped else jobs, min(scales, default=None))
        if guard is not None:
            self._norms, self._joint_figures = judgement.kept, judgement.figures
        if is_skipped:
            for job in jobs:
                self._commit(job, job.tracked.stats, is_taken=False)
        if guard is not None and not self._is_told:
            self._judged += 1
            if self._judged % guard.window == 0:
                self._is_told = warn_if_clipped(judgement.kept.tolist())

    def _joint_norm(self, jobs: Sequence[Job]) -> float:
        squares = squares_of([job.gradient for job in jobs], self._wanted_engine)
        norm = math.sqrt(sum(squares))
        if not math.isfinite(norm) and self._settings.base.numerics.on_nonfinite == "raise":
            guilty = [job.name for job, square in zip(jobs, squares, strict=True) if not math.isfinite(square)]
            raise NonFiniteError(f"these gradients are not finite, or too large to be squared: {guilty}")
        return norm

    def _run(self, jobs: Sequence[Job], scale: float | None = None) -> None:
        """Step parameters by the engine that was asked for. scale: multiplies all gradients."""
        if self._is_evaluated:
            raise OptionError("a step within averaged(): leave it first, since parameters are averages there")
        with self._native.lock:
            jobs = separate(jobs)
            native, others = divide(jobs, self._wanted_engine)
            self._engines_used = {name for name, used in (("fused", native), ("reference", others)) if used}
            # numpy does products best, of noise by native code
            whole = [job for job in native if job.rule.needs_whole]
            native = [job for job in native if not job.rule.needs_whole]
            computed: Iterable[tuple[Job, Advance]] = itertools.chain(
                ((job, job.compute(scale)) for job in others),
                ((job, job.compute(scale, job.draw_noise)) for job in whole),
            )
            taken, write = self._native.measure(native, scale)
            if self._settings.base.numerics.on_nonfinite == "raise":
                computed = list(computed)  # nothing is written before everything is known to be finite
                finite = [*zip(native, taken, strict=True), *((job, new.finite) for job, new in computed)]
                for job, is_finite in finite:
                    if not is_finite:
                        message = f"parameter {job.name!r}, step {job.t}: the gradient or the update is not finite"
                        raise NonFiniteError(message)
            self._tracked.update({job.name: job.tracked for job in jobs})  # in their order, whatever steps them
            for job, stats, is_taken in zip(native, write(), taken, strict=True):
                self._commit(job, stats, is_taken)
            for job, result in computed:
                is_taken = result.finite is None or bool(result.finite)
                if is_taken:
                    # before the parameter is written: a rule may keep it, or the gradient, as it is
                    state = {key: apart(entry, job.gradient, job.weights) for key, entry in result.state.items()}
                    job.weights[...] = result.p
                    job.tracked.state, job.tracked.operand = state, None
                self._commit(job, partial(dict, result.stats), is_taken)

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
        """How each parameter will be treated, what its state will cost (none is made), what looks like a mistake."""
        rows = []
        lr = value_at("lr", self.lr, 1)
        arrays = [(checked_name(name), weights) for name, weights, _ in pairs(params, params)]
        for name, weights in arrays:
            check_array("parameter", name, weights)
            setting, _ = self._settings.choose(str(name), weights)
            setting = replace(setting, lr_scale=setting.lr_scale * self.lr_scale(name))
            facts = str(name), weights.shape, xp.dtype(weights), setting
            rms = math.sqrt(squares_of([weights], self._wanted_engine)[0] / weights.size) if weights.size else None
            rows.append(explain_parameter(*facts, lr=lr, rms=rms, counter_bytes=0))
        return Explanation(rows, self._settings.unused_overrides(arrays))

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

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs, as plain values and copies of arrays."""
        lr = None if callable(self.lr) else self.lr
        return pack_state(self.rule, copy.deepcopy(self.state), lr=lr, iteration=self.iteration)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state. On any error nothing is changed.

        A learning rate that was a number is restored too, unless this optimizer's is a function.
        """
        read_state(state_dict, self.rule, self.options)
        try:
            loaded, norms = read_entries(state_dict["state"])
            iteration = read_count("the iteration of this state", state_dict["iteration"])
            for name, tracked in loaded.items():
                known = self._tracked.get(name)
                if known and known.setting and known.shape is not None:
                    check_fits(xp, name, known.setting.rule, known.shape, tracked.state)
            if state_dict["lr"] is not None and not callable(self.lr):
                self.lr = state_dict["lr"]  # checked there, before anything is changed
        except (OptionError, ParameterError) as error:
            raise StateError(f"this state is damaged: {error}") from None
        self._tracked, self._norms, self._is_loaded = loaded, norms, True
        self.iteration = iteration

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
        usual: dict[str, Any] = dict(lr=None, variant=None, overrides=[], global_step=False, engine="auto")
        given = self._arguments(self._settings.changed())
        shown = [f"{name}={value!r}" for name, value in given.items() if name not in usual or value != usual[name]]
        return f"{type(self).__name__}({', '.join(shown)})"
