"""Mixtures: several rules in one optimizer, each for the parameters that a pattern chooses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from thalweg.errors import OptionError, ParameterError
from thalweg.overrides import OverrideList, Pattern, as_written, check_pattern, is_list, matches
from thalweg.rules import Rule
from thalweg.rules.checks import require
from thalweg.settings import WHOLE_STEP, Settings

P = TypeVar("P")

#: The learning rates of ready-made mixtures that get none: of AdamW, and of the rules for hidden matrices beside it.
ADAMW_RATE = 3e-4
RATES = {"Kron": 3e-4, "Muon": 0.02}

#: How many names of parameters an error tells.
MOST_TOLD = 20


@dataclass(frozen=True)
class RuleOptions:
    """A rule with its learning rate and its options, checked: what ``options()`` of an optimizer's class returns."""

    settings: Settings
    lr: Any

    @property
    def rule(self) -> type[Rule]:
        return self.settings.rule

    @property
    def options(self) -> Mapping[str, Any]:
        """What was given; all else is at its default."""
        return self.settings.given

    def within(self, whole: Mapping[str, Any], overrides: OverrideList) -> RuleOptions:
        """As it holds in a mixture. whole: options of the whole step. overrides: of all rules; its own come later."""
        own = self.settings
        settings = Settings(own.rule, {**own.given, **whole}, own.variant, (*overrides, *own.overrides))
        settings.validate_lr(self.lr(1) if callable(self.lr) else self.lr)
        return RuleOptions(settings, self.lr)

    def __repr__(self) -> str:
        own = self.settings
        given: dict[str, Any] = {"lr": self.lr, **({"variant": own.variant} if own.variant else {}), **own.given}
        if own.overrides:
            given["overrides"] = as_written(own.overrides)
        return f"{own.rule.__name__}.options({', '.join(f'{name}={value!r}' for name, value in given.items())})"


#: A pattern, and what holds for the parameters that it is the first to match. None: it matches none.
Entry: TypeAlias = tuple[Pattern | None, RuleOptions]


def check_own(rule: type[Rule] | None, options: Mapping[str, Any]) -> type[Rule]:
    """Refuse options of the whole step, which cannot belong to one rule of several."""
    if rule is None:
        raise OptionError("options() is for the class of one rule, such as AdamW.options(lr=1e-3)")
    for name in WHOLE_STEP:
        require(name not in options, f"{name} concerns the whole step: give it to the mixture, not to one of its rules")
    return rule


def checked_entries(
    entries: Any, whole: Mapping[str, Any], overrides: OverrideList
) -> list[tuple[Pattern | None, RuleOptions]]:
    """The entries of a mixture, each with the options of the whole step and the overrides of all rules."""
    wanted = (
        "a mixture is a list of (pattern, options), such as "
        "[('*.weight', Kron.options(lr=3e-4)), ('*', AdamW.options(lr=3e-4))]"
    )
    require(is_list(entries) and len(entries) > 0, f"{wanted}, got {entries!r}")
    known: dict[str, type[Rule]] = {}
    result: list[tuple[Pattern | None, RuleOptions]] = []
    for entry in entries:
        pair = is_list(entry) and len(entry) == 2 and isinstance(entry[1], RuleOptions)
        require(pair, f"{wanted}, got the entry {entry!r}")
        pattern, own = entry
        check_pattern(pattern)
        check_one_rule(known, own.rule)
        result.append((pattern, merged(own, whole, overrides, f"entry {pattern!r}")))
    return result


def merged(own: RuleOptions, whole: Mapping[str, Any], overrides: OverrideList, where: str) -> RuleOptions:
    try:
        return own.within(whole, overrides)
    except OptionError as error:
        raise OptionError(f"{where}: {error}") from None


def check_one_rule(known: dict[str, type[Rule]], rule: type[Rule]) -> None:
    """Refuse two rules of one name: checkpoints tell rules by their names."""
    if known.setdefault(rule.__name__, rule) is not rule:
        raise OptionError(f"two rules are named {rule.__name__}: checkpoints need names that differ")


def divided(entries: Sequence[Entry], named: Iterable[tuple[Any, P]]) -> dict[int, list[tuple[Any, P]]]:
    """Parameters by the place of the first entry that matches them; raise if there are some without."""
    found: dict[int, list[tuple[Any, P]]] = defaultdict(list)
    missing = []
    for name, parameter in named:
        place = first_match(entries, str(name), parameter)
        if place is None:
            missing.append(name)
        else:
            found[place].append((name, parameter))
    check_all_matched(missing)
    return dict(sorted(found.items()))


def first_match(entries: Sequence[Entry], name: str, parameter: Any) -> int | None:
    for place, (pattern, _) in enumerate(entries):
        if pattern is not None and matches(pattern, name, parameter):
            return place
    return None


def adamw_share(rule: type[Rule], options: Mapping[str, Any]) -> float:
    """AdamW's learning rate beside a rule for hidden matrices, as a share of that rule's own.

    It is 1 where steps of both have the same size, as under scaling="match_rms_adamw", and else that of the default
    rates. options: those of the rule.
    """
    variant = rule.VARIANTS.get(options.get("variant") or "", {})
    if {**variant, **options}.get("scaling") == "match_rms_adamw":
        return 1.0
    return ADAMW_RATE / RATES[rule.__name__]


def rates_with_adamw(rule: type[Rule], options: Mapping[str, Any], lr: float | None) -> tuple[float, float]:
    """The learning rates of a rule for hidden matrices and of AdamW beside it. lr: the user's; None: the default."""
    share = adamw_share(rule, options)
    lr = lr if lr is not None else ADAMW_RATE if share == 1 else RATES[rule.__name__]
    return lr, lr * share


def check_all_matched(missing: Sequence[Any]) -> None:
    if missing:
        told = ", ".join(map(repr, missing[:MOST_TOLD]))
        more = f" and {len(missing) - MOST_TOLD} more" if len(missing) > MOST_TOLD else ""
        raise ParameterError(
            f"no entry of this mixture matches {told}{more}: add a last entry for all others, such as "
            "('*', AdamW.options(lr=1e-3))"
        )


def in_words(rules: Iterable[str]) -> str:
    """The name of a rule, or the names of those in a mixture."""
    names = list(dict.fromkeys(rules))
    if len(names) < 2:
        return "".join(names)
    return f"a mixture of {', '.join(names[:-1])} and {names[-1]}"
