"""The optimizer for raw arrays: what all of them have in common."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any, TypeVar, overload

import numpy as np

from thalweg.arrays import Shape
from thalweg.errors import OptionError, ParameterError, StateError, UnusedOverrideWarning
from thalweg.exchange import warn_converted
from thalweg.explain import Explanation, explain_parameter, write_programs
from thalweg.given import Overrides, Standard, as_written, check_overrides, plain
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
from thalweg.numpy.job import Job
from thalweg.numpy.memory import Tracked
from thalweg.numpy.stepping import Engine, Stepping
from thalweg.rules.checks import check_flag, check_number
from thalweg.settings import RuleOptions, Setting, Settings, check_own, option_names
from thalweg.spaces import numpy as xp
from thalweg.storage import check_eight_bits, codecs_of, converted, first_state, fitting_shapes
from thalweg.trial import check_update

Self = TypeVar("Self", bound="Optimizer")


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
        self._configure(lr, global_step, engine, Settings(self.rule, options, variant, check_overrides(overrides)))

    def _configure(self, lr: Rate, global_step: bool, engine: Engine, settings: Settings) -> None:
        check_flag("global_step", global_step)
        check_served(settings)
        self._choose(engine, settings)
        self._global_step = global_step
        self._rates_checked: Any = None
        #: The places of rules and of the overrides of each that have matched a parameter.
        self._matched: set[tuple[int, int]] = set()
        #: The places of rules that step a parameter.
        self._used: set[int] = set()
        self.lr = lr

    # ---- options

    @property
    def lr(self) -> Any:
        """The learning rate: a number, a function of the step, or None for the rule's own."""
        return self._lr

    @lr.setter
    def lr(self, value: Rate) -> None:
        self._lr = checked_rate(value, self._settings)

    #: Of an optimizer: every option of the rule and around it, as it holds where no override applies. Of a class:
    #: ``options(lr=..., ...)`` makes options for an entry of a mixture.
    options = OptionsOf()

    def _every_option(self) -> dict[str, Any]:
        return self._settings.options

    def _parts(self) -> Sequence[tuple[Settings, Rate]]:
        """The rules with their options and learning rates: of a mixture several."""
        return [(self._settings, self._lr)]

    def _place_of(self, name: Name, weights: Arr) -> int:
        """The place of a parameter's rule among them."""
        return 0

    def with_options(self: Self, **options: Any) -> Self:
        """A copy, state included, with some options changed; ``with_lr(x)`` and the like do the same for one."""
        changed = self.copy()
        lr = options.pop("lr", self._lr)
        variant = options.pop("variant", self._settings.variant)
        overrides = options.pop("overrides", self._settings.overrides)
        global_step = options.pop("global_step", self._global_step)
        engine = options.pop("engine", self._wanted_engine)
        settings = Settings(self.rule, {**self._settings.given, **options}, variant, overrides)
        changed._configure(lr, global_step, engine, settings)
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
        is_raw = shape is None and np.ndim(weights) == 1
        self._run([self._job(name, weights, gradient, shape, lr_scale, is_raw=is_raw)], None)

    def step(
        self, params: Mapping[str, Arr] | Sequence[Arr], grads: Mapping[str, Arr | None] | Sequence[Arr | None]
    ) -> None:
        """Step a whole model in place, given as two mappings by name or two sequences.

        Parameters without a gradient (None, or no entry in the mapping) are left alone. The shape of each is its own:
        an array of one axis is a vector.
        """
        jobs = [self._job(name, weights, gradient, None, 1.0) for name, weights, gradient in pairs(params, grads)]
        check_apart({job.name: job.place for job in jobs})
        self._report_unused(len(jobs) == len(params))
        scale = self._grad_scale(jobs)
        self._run(jobs, scale)
        self.end_iteration()

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
        given = self._parts()[tracked.place][1]
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
        setting, matched = self._parts()[place][0].of(str(name), weights, shape=shape)
        if tracked.made_by not in (None, type(setting.rule)):
            raise StateError(
                f"the state of {name!r} is one of {tracked.made_by.__name__}, and {type(setting.rule).__name__} steps "
                "it here: construct the mixture with the saved entries"
            )
        setting.rule.check_shape(name, weights.shape)
        check_update(setting.rule, weights.shape)
        with np.errstate(all="ignore"):
            if tracked.step == 0 and not tracked.state:
                tracked.state = first_state(xp, setting.rule, setting.handling, weights)
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
        self._matched.update((place, index) for index in matched)
        self._used.add(place)
        tracked.setting, tracked.shape, tracked.is_raw = setting, weights.shape, is_raw
        tracked.place, tracked.made_by = place, type(setting.rule)
        return setting

    def _report_unused(self, complete: bool) -> None:
        """Warn, once, of overrides that matched no parameter of a whole model."""
        unused = self._unused(self._matched)
        if unused and complete:
            self._matched.update(self._overrides())
            shown = ", ".join(map(repr, unused))
            warnings.warn(f"overrides that match no parameter: {shown}", UnusedOverrideWarning, stacklevel=3)

    def _overrides(self) -> dict[tuple[int, int], Any]:
        """The patterns of all overrides, by the place of their rule and their own."""
        every = enumerate(settings.overrides for settings, _ in self._parts())
        return {(place, i): pattern for place, own in every for i, (pattern, _) in enumerate(own)}

    def _unused(self, matched: Collection[tuple[int, int]]) -> list[Any]:
        """Patterns of overrides that are not among those that matched."""
        overrides = self._overrides()
        used = {id(overrides[key]) for key in matched}
        unused = {id(o): o for o in overrides.values() if id(o) not in used and not isinstance(o, Standard)}
        return list(unused.values())

    def explain(self, params: Mapping[str, Arr] | Sequence[Arr], *, program: bool = False) -> Explanation:
        """How each parameter of a model will be treated, what its state will cost, and what looks like a mistake.

        program: show the arithmetic of each treatment too, as Python for numpy. No state is made.
        """
        rows, written, matched = [], [], set[tuple[int, int]]()
        used: set[int] = set()
        for name, weights in params.items() if isinstance(params, Mapping) else enumerate(params):
            check_array(f"parameter {checked_name(name)!r}", weights)
            place = self._place_of(name, weights)
            settings, rate = self._parts()[place]
            setting, entries = settings.of(str(name), weights)
            matched.update((place, index) for index in entries)
            used.add(place)
            lr = plain(rate(1)) if callable(rate) else rate
            scaled = replace(setting, lr_scale=setting.lr_scale * self.lr_scale(name))
            facts = str(name), weights.shape, dtype_name(weights), scaled
            row = explain_parameter(*facts, lr=lr, rms=narrow_rms(weights), counter_bytes=0)
            rows.append(row)
            written.append((row, setting, lr is not None))
        programs = write_programs(written if program else ())
        return Explanation(rows, self._unused(matched), unused_entries=self._unused_entries(used), programs=programs)

    def _unused_entries(self, used: Collection[int]) -> list[Any]:
        """The patterns of a mixture whose places are not among these."""
        return []

    # ---- copies

    def copy(self: Self) -> Self:
        """An independent optimizer with the same options and state."""
        return copy.deepcopy(self)

    def __copy__(self: Self) -> Self:
        return self.copy()

    def __repr__(self) -> str:
        given: dict[str, Any] = {} if self._lr is None else {"lr": self._lr}
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
