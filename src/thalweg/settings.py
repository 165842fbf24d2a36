"""From what a user wrote to what holds for one parameter.

Options come from a rule's defaults, from a named variant, from the constructor and from
``overrides`` by parameter name, each winning over the one before. One mechanism serves every rule
and every front end: what is known, what is valid, and what is said otherwise.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal

from thalweg.arrays import is_number
from thalweg.dtypes import Name as DType
from thalweg.dtypes import StateName as StateDType
from thalweg.dtypes import spelt_dtype
from thalweg.errors import OptionError, say_where
from thalweg.given import (
    Pattern,
    Standard,
    as_written,
    check_known,
    check_overrides,
    differ,
    matches,
    plain,
    unused_patterns,
)
from thalweg.rules import AROUND, Rule
from thalweg.rules.around import Around, own_fields, switch_of, with_options
from thalweg.rules.checks import check_choice, check_number, require
from thalweg.rules.entries import Entry as StateEntry
from thalweg.rules.entries import Factor
from thalweg.rules.options import check_options, number_options, option
from thalweg.rules.rule import structure_of
from thalweg.rules.spikes import Spikes

#: What options call eight bits, whatever the role of an entry makes of them.
EIGHT_BITS = "int8"


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """Options that every optimizer has, around its rule."""

    maximize: bool = option(False, "Maximize instead of minimizing.")
    max_grad_norm: float | None = option(
        None,
        "Scale all gradients of a step down together, so that their joint norm is at most this. Needs `step`, which "
        "sees all of them.",
        above=0,
    )
    on_nonfinite: Literal["propagate", "skip", "raise"] = option(
        "propagate",
        "What a step does with NaN or infinity: `'propagate'` lets it through, `'skip'` leaves the parameter and its "
        "state unchanged (in torch: all of them, if any gradient is not finite), `'raise'` raises a `NonFiniteError` "
        "and changes nothing.",
    )
    rounding: Literal["nearest", "stochastic", "compensated"] = option(
        "nearest",
        "How results are rounded to 16-bit parameters. `'stochastic'` rounds up or down at random, correct on average, "
        "so that small steps are not lost. `'compensated'` keeps what rounding cost in 8 bits more, so that nothing is "
        "lost.",
    )
    state_dtype: StateDType | None = option(
        None,
        "How state is stored: `'float32'`, `'float64'`, `'bfloat16'`, `'float16'` or `'int8'`; `'bf16'` and "
        "`torch.bfloat16` are understood too. `None`: float32, or float64 for float64 parameters. `'int8'` is for "
        "momentum and squares of all but small tensors, and leaves the rest as it is.",
    )
    momentum_dtype: StateDType | None = option(
        None, "The same for momentum and first moments alone; wins over `state_dtype`."
    )
    precond_dtype: DType | None = option(
        None,
        "The same for the factors of Kron and SOAP alone; wins over `state_dtype`. Not `'int8'`: factors are "
        "multiplied with one another.",
    )
    state_rounding: Literal["nearest", "stochastic"] = option(
        "nearest",
        "How state as large as its parameter is rounded to 16 or 8 bits. `'stochastic'` is correct on average: a "
        "second moment with `betas[1]=0.999` moves by less than half the distance between neighbours of bfloat16.",
    )
    seed: int = option(0, "Seed of all random numbers.")
    spikes: bool | Spikes = option(
        False,
        "What a step does if the joint norm of all gradients is far above those of the steps before: `True` skips it, "
        "and `thalweg.Spikes(action='clip', window=128, z=6.0)` says more. Needs `step`, which sees all of them.",
    )

    def __post_init__(self) -> None:
        if self.spikes is True:
            object.__setattr__(self, "spikes", Spikes())
        for name in STORAGE:  # torch.bfloat16, or "bf16"
            object.__setattr__(self, name, spelt_dtype(getattr(self, name)))

    def validate(self) -> None:
        require(
            self.spikes is False or isinstance(self.spikes, Spikes),
            f"spikes must be True, False or thalweg.Spikes(action='clip', window=128), got {self.spikes!r}",
        )
        require(
            not isinstance(self.precond_dtype, str) or self.precond_dtype != EIGHT_BITS,
            f"precond_dtype={EIGHT_BITS!r}: factors are multiplied with one another and cannot be kept in eight bits; "
            f"use 'bfloat16', or momentum_dtype={EIGHT_BITS!r} for momentum alone",
        )
        check_options(self)

    def stored(self, entry: StateEntry | type[StateEntry]) -> str | None:
        """The dtype in which a state entry is kept, if it is large enough; None: in that of the arithmetic."""
        for name in entry.stored_by:
            asked = getattr(self, name)
            if asked is not None:
                return entry.eight_bits if asked == EIGHT_BITS else asked
        return None

    @functools.cached_property
    def guard(self) -> Spikes | None:
        """What spikes are and what is done about them; None: nothing looks for them."""
        return self.spikes if isinstance(self.spikes, Spikes) else None

    @functools.cached_property
    def needs_norm(self) -> bool:
        """Whether a step depends on the joint norm of all gradients."""
        return self.max_grad_norm is not None or self.guard is not None

    @functools.cached_property
    def may_skip(self) -> bool:
        """Whether a step may leave everything as it was, which its gradients decide."""
        return self.on_nonfinite == "skip" or (self.guard is not None and self.guard.action == "skip")

    @property
    def is_random(self) -> bool:
        """Whether rounding takes random bits, which depend on the place of an element in its tensor."""
        return "stochastic" in (self.rounding, self.state_rounding)


#: All of these, and those that decide how state is stored.
NUMERIC = tuple(f.name for f in fields(Numerics))
STORAGE = tuple(name for name in NUMERIC if name.endswith("_dtype"))
#: Numerics that concerns the whole step and cannot differ between parameters.
WHOLE_STEP = ("maximize", "max_grad_norm", "on_nonfinite", "seed", "spikes")
#: Those of them that are decided by all gradients of a step together.
JOINT = ("max_grad_norm", "on_nonfinite", "spikes")


@dataclass(frozen=True)
class ParameterOptions:
    """What holds for one parameter. Options of the rule may be functions of the step."""

    rule: Rule
    numerics: Numerics
    lr_scale: float = 1.0

    @functools.cached_property
    def scheduled(self) -> dict[str, Callable[[Any], Any]]:
        return {f.name: getattr(self.rule, f.name) for f in fields(self.rule) if callable(getattr(self.rule, f.name))}

    @functools.cached_property
    def stored_rule(self) -> Rule:
        """The rule as it is best for state that is stored so."""
        return self.rule.for_storage(self.numerics.stored(Factor))

    @functools.cached_property
    def kind(self) -> tuple[Any, ...]:
        """Equal for settings that differ in the values of numbers alone: state and code for them are the same."""
        return structure_of(self.rule), self.numerics

    def is_same(self, other: ParameterOptions) -> bool:
        """Whether other options are equal; those that are traced are equal to themselves alone."""
        if self is other:
            return True
        alike = type(self.rule) is type(other.rule) and self.numerics == other.numerics
        if not alike or self.lr_scale != other.lr_scale:
            return False
        return not any(differ(getattr(self.rule, f.name), getattr(other.rule, f.name)) for f in fields(self.rule))

    def for_shape(self, shape: tuple[int, ...]) -> ParameterOptions:
        """These options for a parameter of this shape, which decides some of them."""
        rule = self.rule.for_shape(shape)
        return self if rule is self.rule else replace(self, rule=rule)

    def rule_at(self, t: Any) -> Rule:
        """The rule with every schedule replaced by its value at step t, checked."""
        if not self.scheduled:
            return self.stored_rule
        rule = replace(self.stored_rule, **{name: plain(schedule(t)) for name, schedule in self.scheduled.items()})
        rule.validate()
        return rule


@dataclass(frozen=True, repr=False)
class RuleOptions:
    """The options of a rule, of one of the rules of a mixture, or of a group, checked as a whole.

    It is what ``options()`` of an optimizer's class returns.
    """

    rule: type[Rule]
    #: What the user gave, by name; the variant's name and the overrides not among them. All else is at its default.
    given: Mapping[str, Any]
    variant: str | None = None
    #: As a user writes them; once this is made, an ``OverrideList``.
    overrides: Any = ()
    #: The learning rate that the user gave; groups have their own by then.
    lr: Any = field(default=None, compare=False)
    base: ParameterOptions = field(init=False)
    #: What options are when they are not given.
    usual: Mapping[str, Any] = field(init=False, repr=False, compare=False)
    #: For which answers to "is lr None?" options are known to have an effect.
    checked_for: set[bool] = field(init=False, default_factory=set, repr=False, compare=False)
    #: What was found for parameters, by their shapes, what was given first, and the entries that match them.
    chosen: dict[tuple[Any, ...], ParameterOptions] = field(init=False, default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        rule = self.rule
        given = {name: plain(value) for name, value in self.given.items()}
        check_known(rule, given, option_names(rule))
        if self.variant is not None:
            require(bool(rule.VARIANTS), f"{rule.__name__} has no variants: leave out variant={self.variant!r}")
            check_choice("variant", self.variant, *rule.VARIANTS)
            if given.keys() >= set(option_names(rule)):
                # a command line that was made of the signature: what is at its default there was not asked for
                given = {name: value for name, value in given.items() if differ(value, defaults(rule)[name])}
        usual = rule.VARIANTS.get(self.variant or "", {})
        object.__setattr__(self, "given", given)
        object.__setattr__(self, "usual", {**defaults(rule), **usual})
        object.__setattr__(self, "base", combined(ParameterOptions(rule(), Numerics()), {**usual, **given}))
        object.__setattr__(self, "overrides", tuple(self.checked_overrides()))

    def __repr__(self) -> str:
        given = {"lr": self.lr, **({"variant": self.variant} if self.variant else {}), **self.given}
        if self.overrides:
            given["overrides"] = as_written(self.overrides)
        return f"{self.rule.__name__}.options({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    def checked_overrides(self) -> Iterator[tuple[Pattern, Mapping[str, Any]]]:
        """The entries of ``overrides``, each possible by itself or after those before it."""
        before = self.base
        for pattern, given in check_overrides(self.overrides):
            options = {name: plain(value) for name, value in given.items()}
            if isinstance(pattern, Standard):
                options = {name: value for name, value in options.items() if name in option_names(self.rule)}
            with say_where(f"overrides, entry {pattern!r}"):
                for name in WHOLE_STEP:
                    require(name not in options, f"{name} concerns the whole step and cannot differ between parameters")
                require("lr" not in options, "lr is given for all: use lr_scale, which multiplies it, in an entry")
                check_known(self.rule, options, (*option_names(self.rule), "lr_scale"))
                try:
                    combined(self.base, options)
                except OptionError:
                    combined(before, options)
            with contextlib.suppress(OptionError):  # two that cannot go together may match different parameters
                before = combined(before, options)
            yield pattern, options

    def validate_lr(self, lr: Any, unasked: Container[str] = ()) -> None:
        """Check lr, and that options have an effect. unasked: those that the user has not asked for."""
        self.base.rule.validate_lr(lr)
        if (lr is None) in self.checked_for:  # all that the effect of options can depend on
            return
        asked = {name: v for name, v in self.given.items() if name not in unasked and differ(v, self.usual[name])}
        self.check_effect({"lr": lr, **asked}, {}, lr)
        held, usual = self.options, defaults(self.rule)
        for pattern, options in self.overrides:
            news = {n: v for n, v in options.items() if n in held and differ(v, held[n]) and differ(v, usual[n])}
            with say_where(f"overrides, entry {pattern!r}"):
                self.check_effect(news, options, lr)
        self.checked_for.add(lr is None)

    def check_effect(self, given: Mapping[str, Any], entry: Mapping[str, Any], lr: Any) -> None:
        """Refuse what has no effect after an entry, nor when any one option of another is added to it."""
        rule = with_options(self.base.rule, for_rule(entry), AROUND)
        idle = find_idle(rule, lr)
        for name, value in given.items():
            if value is None or value is False or name not in idle:  # what is off anyway may be said to be off
                continue
            singles = ({n: v} for _, options in self.overrides for n, v in for_rule(options).items())
            used = any(name not in find_idle(with_options(rule, single, AROUND), lr) for single in singles)
            require(used, f"{name}={value!r} has no effect here: it needs {idle[name]}")

    def choose(
        self,
        name: str,
        parameter: Any,
        *,
        first: tuple[tuple[str, Any], ...] = (),
        shape: tuple[int, ...] | None = None,
    ) -> tuple[ParameterOptions, list[int]]:
        """What holds for a parameter, and which entries of ``overrides`` matched it.

        first: options of this parameter that overrides win over, with their names. shape: what counts as the
        parameter's shape, if it is not its own.
        """
        matched = [i for i, (pattern, _) in enumerate(self.overrides) if matches(pattern, name, parameter)]
        shape = tuple(parameter.shape) if shape is None else shape
        key = shape, first, *matched
        if key not in self.chosen:
            base = combined(self.base, dict(first)) if first else self.base
            setting = self.overridden(base, name, shape, matched)
            # equal settings are one object, so that their parameters are stepped together
            self.chosen[key] = next((same for same in self.chosen.values() if same.is_same(setting)), setting)
        return self.chosen[key], matched

    def overridden(
        self, setting: ParameterOptions, name: str, shape: tuple[int, ...], matched: Sequence[int]
    ) -> ParameterOptions:
        """What holds for a parameter after the entries of ``overrides`` that match it."""
        overriding: dict[str, Any] = {}
        for pattern, options in (self.overrides[index] for index in matched):
            overriding |= options
            with say_where(f"parameter {name!r}, overrides, entry {pattern!r}"):
                setting = combined(setting, options)
        shaped = setting.for_shape(shape)
        # what an override names holds for every shape
        by_name = {name: value for name, value in overriding.items() if name in vars(shaped.rule) and name != "exempt"}
        return shaped if shaped is setting or not by_name else replace(shaped, rule=replace(shaped.rule, **by_name))

    def unused_overrides(self, named: Iterable[tuple[Any, Any]]) -> list[Pattern]:
        """The patterns of ``overrides`` that match none of these parameters, given with their names."""
        return unused_patterns((pattern for pattern, _ in self.overrides), named)

    @property
    def options(self) -> dict[str, Any]:
        """Every option, as it holds where no override applies."""
        current = {**vars(self.base.rule), **vars(self.base.numerics)}
        return {name: current.get(name, default) for name, default in defaults(self.rule).items()}

    def changed(self) -> dict[str, Any]:
        """The options that differ from the defaults, or from those of the variant."""
        usual = defaults(self.rule)
        return {n: v for n, v in self.options.items() if differ(v, usual[n]) or differ(v, self.usual[n])}


@functools.cache
def defaults(rule: type[Rule]) -> Mapping[str, Any]:
    """Every option of a rule and around it, with its default."""
    return MappingProxyType({f.name: f.default for kind in (rule, *AROUND, Numerics) for f in fields(kind)})


def for_rule(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of some options that are a rule's, or of what may be around it."""
    return {name: v for name, v in options.items() if name not in NUMERIC and name != "lr_scale"}


@functools.cache
def around_options() -> dict[str, type[Around]]:
    """The options of what may be around every rule, with whose they are."""
    return {name: wrapper for wrapper in AROUND for name in own_fields(wrapper)}


def numbers_of(rule: type[Rule]) -> frozenset[str]:
    """The options of a rule and of what may be around it that are numbers of the arithmetic."""
    return frozenset().union(*map(number_options, (rule, *AROUND)))


def find_idle(rule: Rule, lr: Any) -> dict[str, str]:
    """Options that have no effect, with what would give them one: also those of what is not around the rule."""
    off = {name: wrapper for name, wrapper in around_options().items() if not isinstance(rule, wrapper)}
    return rule.idle(lr) | {name: wrapper.EXAMPLE for name, wrapper in off.items() if name != switch_of(wrapper)}


@functools.cache
def option_names(rule: type[Rule]) -> tuple[str, ...]:
    return tuple(defaults(rule))


def combined(setting: ParameterOptions, options: Mapping[str, Any]) -> ParameterOptions:
    """A setting with some options replaced, checked."""
    rule = with_options(setting.rule, for_rule(options), AROUND)
    numerics = replace(setting.numerics, **{name: v for name, v in options.items() if name in NUMERIC})
    lr_scale = options.get("lr_scale", setting.lr_scale)
    check_number("lr_scale", lr_scale, low=0.0)
    check_schedules(rule)
    numerics.validate()
    result = ParameterOptions(rule, numerics, lr_scale)
    result.rule_at(1).validate()
    return result


def check_schedules(rule: Rule) -> None:
    """Functions of the step may stand only for options that are numbers."""
    for f in fields(rule):
        value = getattr(rule, f.name)
        if isinstance(value, type):
            example = f"; write {around_options()[f.name].EXAMPLE}" if f.name in around_options() else ""
            raise OptionError(f"{f.name} must be a value, got the class {value.__name__}{example}")
        if callable(value):
            number = f.name in number_options(type(rule))
            require(number, f"{f.name} cannot be a function of the step: it must be {f.type}")


def in_words(rules: Iterable[str]) -> str:
    """The name of a rule, or the names of those in a mixture."""
    names = list(dict.fromkeys(rules))
    if len(names) < 2:
        return "".join(names)
    return f"a mixture of {', '.join(names[:-1])} and {names[-1]}"


# ---- ready-made mixtures

#: The learning rates of ready-made mixtures that get none: of AdamW, and of the rules for hidden matrices beside it.
ADAMW_RATE = 3e-4
RATES = {"Kron": 3e-4, "Muon": 0.02}


def rates_with_adamw(
    rule: type[Rule], options: Mapping[str, Any], lr: Any, adamw_lr: Any = None
) -> tuple[Any, Any, str]:
    """The rates of a rule for hidden matrices and of AdamW beside it, and what to tell of the first, if it looks wrong.

    options: of the rule. lr, adamw_lr: the user's, which may be schedules; None: the default, and AdamW's share of lr,
    which is 1 where steps of both have one size, as under scaling="match_rms_adamw", and else that of the defaults.
    """
    usual, variant = RATES[rule.__name__], rule.VARIANTS.get(options.get("variant") or "", {})
    is_matched = {**variant, **options}.get("scaling") == "match_rms_adamw"
    share = 1.0 if is_matched else ADAMW_RATE / usual
    lr = lr if lr is not None else ADAMW_RATE if is_matched else usual
    if adamw_lr is None:
        adamw_lr = lr if is_matched else (lambda count: lr(count) * share) if callable(lr) else lr * share
    if is_matched or not is_number(lr) or not 0 < lr < usual / 10 or adamw_lr != lr * share:
        return lr, adamw_lr, ""
    hint = (
        f"the rate {lr:g} is that of {rule.__name__}, usually {usual:g}, and AdamW has {adamw_lr:g}, a share of it: "
        "say AdamW's rate apart, or scaling='match_rms_adamw' if one rate is to serve both"
    )
    return lr, adamw_lr, hint
