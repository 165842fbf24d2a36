"""The optimizer for raw arrays: what all of them have in common."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MethodType
from typing import Any, TypeVar, cast, overload

import numpy as np

from thalweg.arrays import Shape
from thalweg.boundary import seen
from thalweg.errors import OptionError, ParameterError, ResumeWarning, StateError, UnusedOverrideWarning
from thalweg.exchange import warn_converted
from thalweg.explain import Explanation, explain_parameter, write_programs
from thalweg.given import (
    Overrides,
    Standard,
    as_written,
    check_overrides,
    places_of,
    plain,
)
from thalweg.numpy.arrays import (
    Arr,
    Name,
    address,
    check_apart,
    check_array,
    checked_name,
    checked_pair,
    dtype_name,
    narrow_rms,
    pairs,
    span,
)
from thalweg.numpy.checks import Rate, check_plain, check_served, checked_rate
from thalweg.numpy.memory import Job, Tracked
from thalweg.numpy.stepping import Engine, Stepping
from thalweg.rules.around import NO_AVERAGE, Wrapped, keeps_average, keys_around
from thalweg.rules.checks import check_flag, check_number
from thalweg.settings import Entry, RuleOptions, Setting, Settings, check_own, option_names
from thalweg.spaces import numpy as xp
from thalweg.storage import check_eight_bits, codecs_of, converted, first_state, fitting_shapes
from thalweg.trial import check_update

Self = TypeVar("Self", bound="Optimizer")
#: What may match no parameter, which a warning tells.
UNUSED = ("overrides", "entries of the mixture")


class OptionsOf:
    """Options: those that an optimizer has, and those that its class makes for a mixture."""

    @overload
    def __get__(self, optimizer: None, owner: type[Optimizer]) -> Callable[..., RuleOptions]: ...
    @overload
    def __get__(self, optimizer: Optimizer, owner: type[Optimizer]) -> dict[str, Any]: ...
    def __get__(self, optimizer: Optimizer | None, owner: type[Optimizer]) -> Any:
        return MethodType(rule_options, owner) if optimizer is None else optimizer._every_option()


def rule_options(cls: type[Optimizer], **options: Any) -> RuleOptions:
    """A rule with a learning rate and options, checked, for an entry of a mixture.

    Without ``lr`` it is the rule's default. ``variant`` and ``overrides`` are as in the constructor.
    """
    rule = check_own(getattr(cls, "rule", None), options)
    lr = options.pop("lr", rule.default_lr)
    variant, overrides = options.pop("variant", None), options.pop("overrides", ())
    settings = Settings(rule, options, variant, overrides)
    check_served(settings)
    return RuleOptions(settings, checked_rate(lr, settings))


class Optimizer(Stepping):
    """Steps numpy arrays in place, name by name or a whole model at once.

    Every optimizer derives from it; its methods are theirs. Override :meth:`lr_scale` for
    learning rates by name that a list of patterns cannot express.
    """

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
        super().__init__()
        self._configure(lr, variant=variant, overrides=overrides, global_step=global_step, engine=engine, **options)

    def _configure(
        self, lr: Rate, *, variant: str | None, overrides: Overrides, global_step: bool, engine: Engine, **options: Any
    ) -> None:
        settings = Settings(self.rule, options, variant, check_overrides(overrides))
        check_served(settings)
        self._begin([("*", RuleOptions(settings, checked_rate(lr, settings)))], global_step, engine)

    def _begin(self, entries: Sequence[Entry], global_step: bool, engine: Engine) -> None:
        """entries: the rules, each with the pattern of its parameters; one optimizer is a mixture of one rule."""
        check_flag("global_step", global_step)
        self._entries = list(entries)
        self._rates: list[Rate] = [own.lr for _, own in entries]
        self._choose(engine, entries[0][1].settings)
        self._global_step = global_step
        self._rates_checked: Any = None
        #: The places of entries that step a parameter, each with None, and with those of its overrides that match one.
        self._used: set[tuple[int, int | None]] = set()
        #: Whether patterns that match no parameter have been told.
        self._reported = False

    # ---- options

    @property
    def lr(self) -> Any:
        """The learning rate: a number, a function of the step, or None for the rule's own. Setting it sets all."""
        if any(rate is not self._rates[0] and rate != self._rates[0] for rate in self._rates):
            raise OptionError(f"entries have different learning rates, {self._rates}: read them from rates")
        return self._rates[0]

    @lr.setter
    def lr(self, value: Rate) -> None:
        self._set_rates([value] * len(self._entries))

    def _set_rates(self, values: Sequence[Rate]) -> None:
        if len(values) != len(self._entries):
            raise OptionError(f"{len(values)} learning rates for {len(self._entries)} entries: give one for each")
        parts = zip(values, self._entries, strict=True)
        self._rates = [checked_rate(value, own.settings) for value, (_, own) in parts]

    #: Of an optimizer: every option of the rule and around it, as it holds where no override applies. Of a class:
    #: ``options(lr=..., ...)`` makes options for an entry of a mixture.
    options = OptionsOf()

    def _every_option(self) -> dict[str, Any]:
        return self._settings.options

    def _arguments(self) -> dict[str, Any]:
        """What makes another one with the same options."""
        own, beside = self._settings, dict(global_step=self._global_step, engine=self._wanted_engine)
        return {"lr": self._rates[0], "variant": own.variant, "overrides": own.overrides, **beside, **own.given}

    def _place_of(self, name: Name, weights: Arr) -> int:
        """The place of a parameter's rule among the entries."""
        return places_of(self._entries, [(name, weights)])[0]

    def with_options(self: Self, **options: Any) -> Self:
        """A copy, state included, with some options changed; ``with_lr(x)`` and the like do the same for one."""
        changed = self.copy()
        changed._configure(**{**self._arguments(), **options})
        for tracked in changed._tracked.values():
            tracked.setting = tracked.unserved = None
        return changed

    def __getattr__(self, name: str) -> Callable[..., Any]:
        option = name.removeprefix("with_")
        if option != name and option in self._chainable():
            return lambda *value: self.with_options(**{option: value[0] if len(value) == 1 else value})
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *(f"with_{name}" for name in self._chainable())]

    def _chainable(self) -> tuple[str, ...]:
        return ("lr", "variant", "overrides", "global_step", "engine", *option_names(self.rule))

    def lr_scale(self, name: Name) -> float:
        """What multiplies the learning rate of a parameter. Made to be overridden."""
        return 1.0

    # ---- stepping

    def update(
        self,
        name: Name,
        weights: Arr,
        gradient: Arr | None,
        *,
        shape: Shape | None = None,
        lr_scale: float = 1.0,
    ) -> None:
        """Step one parameter in place. A gradient of None leaves it alone.

        ``shape`` says how a flat buffer is to be seen: without it, one of one axis counts as a tensor of unknown shape
        and not as a vector, so that ``exempt="vectors"`` leaves it alone. ``lr_scale`` multiplies the learning rate.
        """
        if gradient is None:
            return
        if self._settings.base.handling.max_grad_norm is not None:
            raise OptionError("max_grad_norm needs all gradients of a step at once: use step(params, grads)")
        if self._settings.base.handling.spikes:
            raise OptionError("spikes needs all gradients of a step at once: use step(params, grads)")
        if self._settings.base.handling.accumulates:
            raise OptionError("accumulate counts steps of all parameters: use step(params, grads)")
        is_raw = shape is None and np.ndim(weights) == 1
        self._run([self._job(name, weights, gradient, shape, lr_scale, is_raw=is_raw)], None)

    def step(
        self, params: Mapping[str, Arr] | Sequence[Arr], grads: Mapping[str, Arr | None] | Sequence[Arr | None]
    ) -> None:
        """Step a whole model in place, given as two mappings by name or two sequences.

        Parameters without a gradient (None, or no entry in the mapping) are left alone. The shape of each is its own:
        an array of one axis is a vector.
        """
        handling = self._settings.base.handling
        if handling.accumulates:
            means = self._accumulate(params, grads, handling.accumulate or 1)
            if means is None:
                return
            grads = means
        given = pairs(params, grads)
        places_of(self._entries, [(name, weights) for name, weights, _ in given if name not in self._tracked])
        jobs = [self._job(name, weights, gradient, None, 1.0) for name, weights, gradient in given]
        check_apart({job.name: job.place for job in jobs})
        if not self._reported and len(jobs) == len(params):
            self._reported = True
            for what, patterns in zip(UNUSED, self._unused(self._used), strict=True):
                if patterns:
                    told = ", ".join(map(repr, patterns))
                    warnings.warn(f"{what} that match no parameter: {told}", UnusedOverrideWarning, stacklevel=2)
        self._run_together(jobs)
        self.end_iteration()

    def _accumulate(self, params: Any, grads: Any, wanted: int) -> Any:
        """Add gradients to those of the calls before; the mean of each parameter's if it is time for a step."""
        given = pairs(params, grads)
        places_of(self._entries, [(name, weights) for name, weights, _ in given if name not in self._tracked])
        for job in [self._job(*each, None, 1.0) for each in given]:
            self._tracked.setdefault(job.name, job.tracked).accumulate(job.gradient, job.weights)
        self._accumulated += 1
        if self._accumulated < wanted:
            return None
        sums = {name: own.accumulated for name, own in self._tracked.items()}
        means = {name: total / self._accumulated for name, total in sums.items() if total is not None}
        for own in self._tracked.values():
            own.accumulated = None
        self._accumulated = 0
        return means if isinstance(params, Mapping) else [means.get(place) for place in range(len(params))]

    def end_iteration(self) -> None:
        """Say that every parameter has had its :meth:`update`.

        Each parameter counts its own steps, so that nothing depends on this, but under
        ``global_step=True``: there it begins the next step of all. :meth:`step` calls it itself.
        """
        self.iteration += self._global_step

    def _job(
        self, name: Name, weights: Any, gradient: Any, shape: Shape | None, lr_scale: float, *, is_raw: bool = False
    ) -> Job:
        name = checked_name(name)
        weights, gradient = checked_pair(name, weights, gradient, shape)
        tracked = self._tracked.get(name) or Tracked({})
        if tracked.shape not in (None, weights.shape):
            raise ParameterError(
                f"parameter {name!r} has shape {weights.shape} and had {tracked.shape} before: "
                "a name must keep its shape"
            )
        known = tracked.setting if tracked.is_raw == is_raw else None
        setting = known or self._resolve(name, weights, tracked, is_raw=is_raw)
        t = self.iteration + 1 if self._global_step else tracked.step + 1
        given = self._rates[tracked.place]
        lr = plain(given(t)) if callable(given) else given
        scales = (lr_scale, self.lr_scale(name))
        try:
            self._check_rates(setting, lr, scales)
            rule = setting.rule_at(t)
            for scheduled in setting.scheduled:
                check_plain(scheduled, getattr(rule, scheduled))
        except OptionError as error:
            raise OptionError(f"parameter {name!r}, step {t}: {error}") from None
        scale = plain(setting.lr_scale * scales[0] * scales[1])
        places = span(weights, address(weights)), span(gradient, address(gradient))
        return Job(name, weights, gradient, *places, tracked, rule, setting.handling, t, lr, scale)

    def _check_rates(self, setting: Setting, lr: Any, scales: tuple[Any, Any]) -> None:
        """Check learning rates; what was fine for one parameter is fine for the next."""
        for name, value in (("lr", lr), ("lr_scale", scales[0]), ("lr_scale(name)", scales[1])):
            check_plain(name, value)
        if (id(setting), type(lr), lr, scales) == self._rates_checked:
            return
        setting.rule.validate_lr(lr)
        check_number("lr_scale", scales[0], low=0.0)
        check_number("lr_scale(name)", scales[1], low=0.0)
        self._rates_checked = id(setting), type(lr), lr, scales

    def _resolve(self, name: Name, weights: Arr, tracked: Tracked, *, is_raw: bool) -> Setting:
        """Find what holds for a parameter that is new, or whose options have changed."""
        place = self._place_of(name, weights)
        shape = (1, weights.size) if is_raw else None
        setting, matched = self._entries[place][1].settings.of(str(name), weights, shape=shape)
        rule = self._entries[place][1].rule
        if tracked.made_by not in (None, rule):
            raise StateError(
                f"the state of {name!r} is one of {tracked.made_by.__name__}, and {rule.__name__} steps "
                "it here: construct the mixture with the saved entries"
            )
        setting.rule.check_shape(name, weights.shape)
        check_update(setting.rule, weights.shape)
        with np.errstate(all="ignore"):
            if tracked.step == 0 and not tracked.state:
                tracked.state = first_state(xp, setting.rule, setting.handling, weights)
            elif new := sorted(keys_around(setting.rule, weights.shape) - tracked.state.keys()):
                made = first_state(xp, setting.rule, setting.handling, weights)
                tracked.state = {**tracked.state, **{key: made[key] for key in new}}
                told = f"{', '.join(map(repr, new))} of {name!r} is new and begins with this step"
                warnings.warn(f"{told}; and so for all others alike", ResumeWarning, stacklevel=4)
        wanted = fitting_shapes(xp, setting.rule, weights.shape, tracked.state)
        found = {key: entry.shape for key, entry in tracked.state.items()}
        if wanted != found:
            raise StateError(
                f"the state of {name!r} does not fit its options: they need {wanted}, and the state has {found}; "
                "restore the options that the state was made with, or drop it with clear_state()"
            )
        check_eight_bits(xp, name, tracked.state, codecs_of(xp, setting.rule, weights.shape, tracked.state))
        # kept as these options have it, whatever it was saved in; some processors find a signalling NaN invalid there
        with np.errstate(invalid="ignore"):
            state = converted(xp, setting.rule, setting.handling, weights, tracked.state)
        if self._untold and state.keys() != tracked.state.keys():
            self._untold = False
            warn_converted(name, tracked.state, state)
        tracked.state, tracked.operand, tracked.unserved = state, None, None
        self._used.update((place, index) for index in (None, *matched))
        tracked.setting, tracked.shape, tracked.is_raw = setting, weights.shape, is_raw
        tracked.place, tracked.made_by = place, rule
        return setting

    @contextmanager
    def averaged(self, params: Mapping[str, Arr] | Sequence[Arr]) -> Iterator[None]:
        """Evaluate averages: within, they are in the place of these arrays, which come back to the bit after it.

        They are those of ``averaged`` or ``schedule_free``. Arrays that have none are as they are.
        """
        known = {name: self._tracked[name] for name, _, _ in pairs(params, params) if name in self._tracked}
        rules = {name: own.setting.rule_at(own.step + 1) for name, own in known.items() if own.setting is not None}
        rules = {name: rule for name, rule in rules.items() if keeps_average(rule)}
        if not rules:
            raise OptionError(f"{NO_AVERAGE}; and take a step")
        held: list[tuple[Arr, Arr]] = []
        try:
            for name, own, _ in pairs(params, params):
                if name in rules:
                    rule, state = cast(Wrapped, rules[name]), known[name].state
                    held.append((own, own.copy()))
                    own[...] = rule.evaluate_at(xp, state, seen(xp, own, state), known[name].step)
            self._is_evaluated = True
            yield
        finally:
            self._is_evaluated = False
            for own, before in held:
                own[...] = before

    def _unused(self, used: Collection[tuple[int, int | None]]) -> tuple[list[Any], list[Any]]:
        """The patterns of overrides, and those of entries, that match no parameter. used: those that do, by place."""
        every = {
            (place, i): pattern
            for place, (_, own) in enumerate(self._entries)
            for i, (pattern, _) in enumerate(own.settings.overrides)
        }
        matched = {id(every[key]) for key in used if key in every}
        overrides = {id(o): o for o in every.values() if id(o) not in matched and not isinstance(o, Standard)}
        entries = [pattern for place, (pattern, _) in enumerate(self._entries) if used and (place, None) not in used]
        return list(overrides.values()), entries

    def explain(self, params: Mapping[str, Arr] | Sequence[Arr], *, program: bool = False) -> Explanation:
        """How each parameter of a model will be treated, what its state will cost, and what looks like a mistake.

        program: show the arithmetic of each treatment too, as Python for numpy. No state is made.
        """
        rows, written, used = [], [], set[tuple[int, int | None]]()
        for name, weights in params.items() if isinstance(params, Mapping) else enumerate(params):
            check_array(f"parameter {checked_name(name)!r}", weights)
            place = self._place_of(name, weights)
            setting, matched = self._entries[place][1].settings.of(str(name), weights)
            used.update((place, index) for index in (None, *matched))
            rate = self._rates[place]
            lr = plain(rate(1)) if callable(rate) else rate
            scaled = replace(setting, lr_scale=setting.lr_scale * self.lr_scale(name))
            facts = str(name), weights.shape, dtype_name(weights), scaled
            row = explain_parameter(*facts, lr=lr, rms=narrow_rms(weights), counter_bytes=0)
            rows.append(row)
            written.append((row, setting, lr is not None))
        programs = write_programs(written if program else ())
        overrides, entries = self._unused(used)
        return Explanation(rows, overrides, unused_entries=entries, programs=programs)

    # ---- copies

    def copy(self: Self) -> Self:
        """An independent optimizer with the same options and state."""
        return copy.deepcopy(self)

    def __copy__(self: Self) -> Self:
        return self.copy()

    def __repr__(self) -> str:
        given: dict[str, Any] = {} if self.lr is None else {"lr": self.lr}
        if self._settings.variant is not None:
            given["variant"] = self._settings.variant
        given |= self._settings.changed()
        if self._settings.overrides:
            given["overrides"] = as_written(self._settings.overrides)
        if self._global_step:
            given["global_step"] = True
        if self._wanted_engine != "auto":
            given["engine"] = self._wanted_engine
        return f"{type(self).__name__}({', '.join(f'{name}={readable(value)}' for name, value in given.items())})"


def readable(value: Any) -> str:
    """A representation that Python reads back."""
    if isinstance(value, (list, tuple)):
        inner = ", ".join(map(readable, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' * (len(value) == 1)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {readable(v)}" for key, v in value.items()) + "}"
    return f"float('{value}')" if isinstance(value, float) and math.isinf(value) else repr(value)
