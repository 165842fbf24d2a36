"""The optimizers that can be planned, by name, with the options that were asked for."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thalweg.errors import CommandError, OptionError
from thalweg.given import check_known
from thalweg.settings import Setting, Settings, option_names
from thalweg.show.dtypes import spelt_dtype
from thalweg.show.lists import suggestion
from thalweg.show.registered import OWN, ByRule, named, rule_of

#: Every optimizer: the rule it follows, and options that are usual and not its defaults.
OPTIMIZERS: Mapping[str, tuple[str, Mapping[str, Any]]] = ByRule(
    {"SGD": ("SGD", {"momentum": 0.9})}, lambda rule: (rule, {})
)
#: Learning rates that the front ends take by themselves. Nothing that is planned depends on them but warnings.
DEFAULT_LR: Mapping[str, float | None] = {"LAMB": 1e-3, "AdamW": 1e-3, "Adafactor": None}
#: How people call it.
LEARNING_RATES = ("lr", "learning_rate")
#: A learning rate that is not known.
UNKNOWN_LR = "unknown"


@dataclass(frozen=True)
class Option:
    """An option, for one optimizer or for all that have it."""

    name: str
    value: Any
    optimizer: str | None = None

    def __str__(self) -> str:
        return f"{self.optimizer.lower()}.{self.name}" if self.optimizer else self.name


def parsed_option(text: str) -> Option:
    """An option as the command line has it: ``momentum_dtype=bfloat16``, ``kron.max_size_dense=2048``.

    >>> parsed_option("kron.max_size_dense=2048")
    Option(name='max_size_dense', value=2048, optimizer='Kron')
    """
    name, equals, value = text.partition("=")
    name, value = name.strip(), value.strip()
    owner, dot, rest = name.partition(".")
    if not equals or not name or not value or (dot and not rest):
        raise CommandError(f"--option {text!r} must be NAME=VALUE, such as momentum_dtype=bfloat16")
    try:
        parsed = ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        parsed = value
    if name.endswith("dtype"):
        parsed = spelt_dtype(parsed)
    return Option(rest, parsed, known_optimizer(owner)) if dot else Option(name, parsed)


def known_optimizer(name: str) -> str:
    """The optimizer of that name as it is spelt here: ``adamw`` is AdamW."""
    name = named(name)
    found = next((known for known in (*OPTIMIZERS, *OWN) if known.lower() == name.strip().lower()), None)
    if found is None:
        hint, every = suggestion(name, OPTIMIZERS), f"here are {', '.join(OPTIMIZERS)}"
        raise CommandError(f"there is no optimizer {name!r}: {hint if hint.endswith(every) else f'{hint} T{every}'}")
    return found


def setting_of(name: str, options: Iterable[Option] = ()) -> Setting:
    """What holds for the parameters of an optimizer, options checked by its rule.

    An option for this optimizer alone must have an effect; one for all may have none here.
    """
    rule_name, own = OPTIMIZERS[known_optimizer(name)]
    given: dict[str, Any] = {}
    for option in options:
        if option.optimizer not in (None, name):
            continue
        if option.optimizer is None and not applies(option, name):
            continue
        given[option.name] = option.value
    variant = given.pop("variant", None)
    try:
        rule = rule_of(rule_name)
        check_known(rule, given, option_names(rule))
        settings = Settings(rule, {**own, **given}, variant)
        lr = DEFAULT_LR.get(name, 1e-3)
        everywhere = {option.name for option in options if option.optimizer is None}
        settings.validate_lr(lr, unasked={*own, *everywhere})
    except OptionError as error:
        told = str(error)
        raise CommandError(told if told.startswith(name) else f"{name}: {told}") from None
    return settings.base


def applies(option: Option, name: str) -> bool:
    """Whether an option for all concerns this optimizer: it is one of its rule's."""
    return option.name in (*option_names(rule_of(OPTIMIZERS[name][0])), "variant")


def check_used(options: Iterable[Option], settings: Mapping[str, Setting]) -> None:
    """Say which option concerns none of the optimizers that are planned."""
    for option in options:
        if option.optimizer is not None:
            continue
        concerned = [name for name in settings if applies(option, name)]
        idle = [settings[name].rule.idle(DEFAULT_LR.get(name, 1e-3)).get(option.name) for name in concerned]
        if idle and all(idle):
            raise CommandError(f"the option {option} has no effect on any optimizer here: it needs {idle[0]}")


def check_known_options(options: Iterable[Option], names: Sequence[str]) -> None:
    """Say which option none of the optimizers has."""
    for option in options:
        if option.optimizer is not None and option.optimizer not in names:
            raise CommandError(
                f"the option {option} is for {option.optimizer}, which is not among the optimizers: {', '.join(names)}"
            )
        if option.name in LEARNING_RATES:
            raise CommandError(f"nothing that is planned depends on the learning rate: leave out --option {option}")
        if option.optimizer is None and not any(applies(option, name) for name in names):
            known = {own for name in names for own in option_names(rule_of(OPTIMIZERS[name][0]))}
            hint = suggestion(option.name, sorted(known))
            raise CommandError(f"no optimizer here has an option {option.name!r}: {hint}")
