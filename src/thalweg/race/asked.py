"""Validate options: which contestants have them, and whether their rules accept the values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from thalweg.errors import CommandError, OptionError
from thalweg.given import check_known
from thalweg.race.contestants import CONTESTANTS, Contestant, Mixed
from thalweg.race.rivals import RATE_NAMES, Rival
from thalweg.settings import Settings, option_names
from thalweg.show.lists import suggestion
from thalweg.show.registered import rule_of

#: Options by contestant; under "" those for all that have them.
Asked = Mapping[str, Mapping[str, Any]]
Rates = Mapping[str, Sequence[float]]


def split_rates(asked: Asked, rates: Rates) -> tuple[Asked, Rates]:
    """The options without learning rates, which are tried one after another; and the rates with them."""
    others, found = {}, dict(rates)
    for owner, options in asked.items():
        if not isinstance(options, Mapping):
            raise CommandError(f"options of {owner or 'all optimizers'} must be a dict, got {options!r}")
        others[owner] = {name: value for name, value in options.items() if name not in RATE_NAMES}
        for name in options.keys() & RATE_NAMES:
            if owner in found:
                raise CommandError(
                    f"the learning rate of {owner or 'all optimizers'} is given twice, as a rate and as an option"
                )
            found[owner] = options[name] if isinstance(options[name], (list, tuple)) else [options[name]]
    return others, found


def with_asked(contestants: Sequence[Contestant], asked: Asked) -> list[Contestant]:
    """Everyone who takes part with what was asked of them, checked by their rules."""
    check_owners(asked, contestants)
    everywhere = asked.get("", {})
    found = []
    for contestant in contestants:
        for_all = {name: value for name, value in everywhere.items() if has(contestant, name, value)}
        own = asked.get(contestant.name, {})
        found.append(contestant.asked(checked(contestant, for_all, own)))
    for name in everywhere:
        if not any(name in each.given or name in asked.get(each.name, {}) for each in found):
            raise CommandError(nobody_has(name, everywhere[name], contestants))
    return found


def check_owners(asked: Iterable[str], contestants: Sequence[Contestant], what: str = "options") -> None:
    """Refuse options and rates that are for an optimizer which does not race."""
    names = [contestant.name for contestant in contestants]
    for owner in asked:
        if owner and owner not in names:
            if owner in CONTESTANTS:
                raise CommandError(
                    f"there are {what} for {owner}, which does not take part: the optimizers are {', '.join(names)}"
                )
            raise CommandError(f"there is no optimizer {owner!r}: {suggestion(str(owner), names)}")


def has(contestant: Contestant, name: str, value: Any) -> bool:
    """Whether an option for all concerns this one."""
    if isinstance(contestant, (Rival, Mixed)):
        return name in contestant.known
    rule = rule_of(contestant.rule)
    if name == "variant":
        return value in rule.VARIANTS
    return name in option_names(rule)


def checked(contestant: Contestant, for_all: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """What is asked of one: an option of its own must have an effect, one for all is left out where it has none."""
    given = {**for_all, **own}
    try:
        if isinstance(contestant, (Rival, Mixed)):
            if contestant.closed:
                check_known(contestant.name, given, contestant.known)
            return given
        known = (*option_names(rule_of(contestant.rule)), "variant")
        check_known(rule_of(contestant.rule), given, known)
        settings = settled(contestant, given)
        idle = settings.base.rule.idle(1.0)
        given = {name: value for name, value in given.items() if name in own or name not in idle}
        settled(contestant, given).validate_lr(1.0, unasked=contestant.options.keys() - given.keys())
    except OptionError as error:
        told = str(error)
        raise CommandError(told if told.startswith(contestant.name) else f"{contestant.name}: {told}") from None
    return given


def settled(contestant: Contestant, given: Mapping[str, Any]) -> Settings:
    options = {**contestant.options, **given}
    variant = options.pop("variant", None)
    return Settings(rule_of(contestant.rule), options, variant)


def nobody_has(name: str, value: Any, contestants: Sequence[Contestant]) -> str:
    if any(has(contestant, name, value) for contestant in contestants):
        return f"the option {name}={value!r} has no effect on any optimizer here"
    known = {option for c in contestants for option in options_of(c)}
    return f"no optimizer here has an option {name!r}: {suggestion(name, sorted(known))}"


def options_of(contestant: Contestant) -> Sequence[str]:
    return contestant.known if isinstance(contestant, (Rival, Mixed)) else option_names(rule_of(contestant.rule))
