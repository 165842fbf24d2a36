"""An option is a field that says all about itself: default, type, range, meaning, what it needs, other names.

The annotation is the type, and its ``Literal`` the choices. :func:`option` says the rest. From both come the check and
its message, "has no effect", signatures, types for editors, and the tables of the docs. A plain ``beta: float = 0.9``
is an option too, of which nothing is checked.
"""

from __future__ import annotations

import ast
import functools
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, NamedTuple

from thalweg.arrays import Scalar, is_number
from thalweg.rules.blocks import is_zero
from thalweg.rules.checks import (
    check_bounds,
    check_choice,
    check_count,
    check_flag,
    check_number,
    check_several,
    is_known,
    require,
)

#: What is given for betas where they are two options.
BETAS = {name: f"betas=({name[:-1]}1, {name[:-1]}2)" for name in ("beta1", "beta2", "b1", "b2")}

#: What rules say of the option by which they choose the precision of their products.
PRECISION = (
    "The precision of float32 products on GPUs: `'tf32'`, ten bits and many times as fast, where the GPU has it; or "
    "`'float32'`. CPUs have the second alone."
)


class Mask(NamedTuple):
    """An argument of an optax function: a tree of truth values, and where it is False an option is off."""

    option: str
    default: Any = None


class Need(NamedTuple):
    """What another option has to be: "trust" (on), "split > 1", "scaling = 'match_rms_adamw'"."""

    option: str
    relation: str = ""
    value: Any = None

    @classmethod
    def parse(cls, text: str) -> Need:
        name, relation, value = re.fullmatch(r"(\w+)(?: (=|>) (.+))?", text).groups()  # type: ignore[union-attr]
        return cls(name, relation or "", ast.literal_eval(value) if value else None)

    def is_met(self, rule: object) -> bool:
        value = getattr(rule, self.option)
        if self.relation == "=":
            return is_known(value) and bool(value == self.value)
        if self.relation == ">":
            return not is_number(value) or value > self.value
        return value is not None if self.may_be_none(type(rule)) else not is_zero(value)

    def may_be_none(self, kind: Any) -> bool:
        return NoneType in typing.get_args(hints_of(kind)[self.option])

    def describe(self, kind: Any) -> str:
        """What to write, for the class of a rule that has the option."""
        if self.relation:
            return f"{self.option}={self.value!r}" if self.relation == "=" else f"a {self.option} above {self.value}"
        hint = hints_of(kind)[self.option]
        if hint is bool:
            return f"{self.option}=True"
        values = [value for alternative in alternatives(hint) for value in choices_of(alternative) if value is not None]
        if len(values) == 1:
            return f"{self.option}={values[0]!r}"
        return f"a {self.option}" if self.may_be_none(kind) else f"a {self.option} above 0"


@dataclass(frozen=True)
class Option:
    """What is known of an option beside its default and its type."""

    #: What it means: sentences, as the docs have them.
    doc: str = ""
    #: The least and the largest number, itself included (``low``, ``high``) or not (``above``, ``below``).
    low: float | None = None
    above: float | None = None
    high: float | None = None
    below: float | None = None
    #: Whether a pair is (low, high) with low < high, of which high may be infinite.
    is_range: bool = False
    #: What gives it an effect.
    need: Need | None = None
    #: By value, what another option has to be beside it, and why.
    requires: Mapping[Any, tuple[Need, str]] = field(default_factory=dict)
    #: An option around every rule that has no effect unless this one is on.
    stores: str = ""
    #: What other libraries call it, or have in its place, and how to say it here.
    elsewhere: Mapping[str, str] = field(default_factory=dict)

    @property
    def ends(self) -> dict[str, Any]:
        """The range, as ``check_number`` takes it."""
        low, high = self.low if self.above is None else self.above, self.high if self.below is None else self.below
        lower = {} if low is None else {"low": low, "open_low": self.above is not None}
        return lower if high is None else {**lower, "high": high, "open_high": self.below is not None}

    @property
    def range(self) -> str:
        """The range, in words."""
        ends = self.ends
        if "low" in ends and "high" in ends:
            return (
                f"in {'(' if ends['open_low'] else '['}{ends['low']}, {ends['high']}{')' if ends['open_high'] else ']'}"
            )
        return "" if not ends else f"{'above' if ends['open_low'] else 'at least'} {ends['low']}"


def option(
    default: Any,
    doc: str = "",
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
    is_range: bool = False,
    needs: str = "",
    requires: Mapping[Any, str] = MappingProxyType({}),
    stores: str = "",
    elsewhere: Mapping[str, str] | str = "",
) -> Any:
    """A field that is an option. Beside its default, all by keyword:

    doc: what it means. low, above, high, below: the range of a number, or of each of a pair. is_range: a pair that is
    (low, high). needs: another option without which it has no effect: "trust", "split > 1", "scaling = 'optax'".
    requires: by value, what another option must be beside it, and why: {True: "mode = 'ema': sums have no weights"}.
    stores: an option around the rule that has no effect without this one. elsewhere: names that other libraries have
    for it, separated by spaces; or a mapping from such names to what to write here.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True, kw_only=True)
    ... class Options:
    ...     beta: float = option(0.9, "Memory of the average.", low=0, below=1)
    >>> check_options(Options(beta=1.0))
    Traceback (most recent call last):
    thalweg.errors.OptionError: beta must be a finite number >= 0 and < 1, got 1.0
    """
    names = elsewhere if isinstance(elsewhere, Mapping) else dict.fromkeys(elsewhere.split(), "")
    need = Need.parse(needs) if needs else None
    parts = {value: text.partition(": ") for value, text in requires.items()}
    beside = {value: (Need.parse(wanted), why) for value, (wanted, _, why) in parts.items()}
    spec = Option(doc, low, above, high, below, is_range, need, beside, stores, names)
    return field(default=default, metadata={"option": spec})


@functools.cache
def options_of(kind: Any) -> Mapping[str, Option]:
    """The options of a rule that say something about themselves."""
    return {f.name: f.metadata["option"] for f in fields(kind) if "option" in f.metadata}


@functools.cache
def hints_of(kind: Any) -> Mapping[str, Any]:
    """The types of all options. Names that are known only where a rule was written are taken for anything."""
    try:
        hints = typing.get_type_hints(kind, include_extras=True)
    except (NameError, TypeError, AttributeError):
        hints = {}
    return {f.name: hints.get(f.name, plain_hint(f)) for f in fields(kind)}


def plain_hint(f: Field[Any]) -> Any:
    plain = {"float": float, "bool": bool, "int": int, "str": str, "Scalar": Scalar}
    return plain.get(str(f.type), Any) if isinstance(f.type, str) else f.type


def is_of_arithmetic(f: Field[Any]) -> bool:
    """Whether an option is a number of the arithmetic: it may be traced. Others decide how a rule computes."""
    return "Scalar" in str(f.type) or str(f.type) in ("float", "<class 'float'>", "tuple[float, float]")


@functools.cache
def number_options(kind: Any) -> frozenset[str]:
    return frozenset(f.name for f in fields(kind) if is_of_arithmetic(f))


def is_structure(value: Any) -> bool:
    """Whether the value of a number says how to compute, and not how much: a rule may ask whether it is off."""
    return value is None or isinstance(value, (bool, str)) or (is_number(value) and value == 0)


def elsewhere_of(kind: Any) -> dict[str, str]:
    """By the names that other libraries use: what to write here."""
    return {theirs: here or name for name, spec in options_of(kind).items() for theirs, here in spec.elsewhere.items()}


def idle_options(rule: object) -> dict[str, str]:
    """Options that have no effect because another is off, each with what it needs."""
    idle: dict[str, str] = {}
    kind: Any = type(rule)
    for name, spec in options_of(kind).items():
        if spec.need is not None and not spec.need.is_met(rule):
            idle[name] = spec.need.describe(kind)
        if spec.stores and not Need(name).is_met(rule):
            idle[spec.stores] = Need(name).describe(kind)
    return idle


# ---- checks


def check_options(rule: object) -> None:
    """Raise an OptionError for the first option of the wrong type, out of range, or impossible beside another."""
    kind: Any = type(rule)
    for name, check in checks_of(kind).items():
        check(getattr(rule, name))
    for name, value, need, why in requirements_of(kind):
        if getattr(rule, name) == value:
            require(need.is_met(rule), f"{name}={value!r} needs {need.describe(kind)}{f': {why}' if why else ''}")


@functools.cache
def requirements_of(kind: Any) -> list[tuple[str, Any, Need, str]]:
    """Values of options that need another option: each with what it has to be, and why."""
    specs = options_of(kind).items()
    return [(name, value, *need) for name, spec in specs for value, need in spec.requires.items()]


@functools.cache
def checks_of(kind: Any) -> Mapping[str, Callable[[Any], None]]:
    """The check of each option, made once: schedules have their values checked at every step."""
    return {name: make_check(name, hints_of(kind)[name], spec) for name, spec in options_of(kind).items()}


def alternatives(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if isinstance(hint, UnionType) or typing.get_origin(hint) is typing.Union else (hint,)


def make_check(name: str, hint: Any, spec: Option) -> Callable[[Any], None]:
    """A function that raises an OptionError for a value that the option cannot have."""
    kinds = alternatives(hint)
    choices = [choice for kind in kinds for choice in choices_of(kind)]
    others = [kind for kind in kinds if not choices_of(kind)]
    if kinds == (bool,):
        return functools.partial(check_flag, name)
    if not others:
        return lambda value: check_choice(name, value, *choices)
    check_other = make_check_of_numbers(name, others, spec)
    if not choices:
        return check_other

    def check(value: Any) -> None:
        if isinstance(value, str) and any(isinstance(choice, str) for choice in choices):
            check_choice(name, value, *choices)
        elif not any(type(value) is type(choice) and value == choice for choice in choices):
            check_other(value)

    return check


def make_check_of_numbers(name: str, kinds: list[Any], spec: Option) -> Callable[[Any], None]:
    """The check of the alternatives of a type that are not choices."""
    ends = spec.ends
    classes = tuple(kind for kind in kinds if isinstance(kind, type) and kind not in (int, float))
    tuples = [typing.get_args(kind) for kind in kinds if typing.get_origin(kind) is tuple]

    def check_each(value: Any) -> None:
        for index, number in enumerate(check_several(name, value, len(tuples[0]))):
            check_number(f"{name}[{index}]", number, **ends)

    def check_whole(value: Any) -> None:
        if not (tuples and isinstance(value, tuple)):  # which the rule checks
            check_count(name, value, spec.low, spec.below)

    def check_one(value: Any) -> None:
        if not isinstance(value, classes):  # an object, such as a schedule, is checked when it is made
            check_number(name, value, **ends)

    if spec.is_range:
        return functools.partial(check_bounds, name)
    if len(tuples) == 1 and {*tuples[0]} <= {float, Scalar}:
        return check_each
    if int in kinds:
        return check_whole
    return check_one if float in kinds or Scalar in kinds or ends else lambda value: None


def choices_of(kind: Any) -> tuple[Any, ...]:
    if typing.get_origin(kind) is Literal:
        return typing.get_args(kind)
    return {bool: (True, False), NoneType: (None,)}.get(kind, ()) if isinstance(kind, type) else ()
