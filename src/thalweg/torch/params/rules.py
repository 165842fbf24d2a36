"""The rules of an optimizer: a mixture, which may have one entry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor

from thalweg.errors import OptionError, ParameterError, say_where
from thalweg.given import (
    OverrideList,
    Overrides,
    Pattern,
    check_entries,
    check_overrides,
    first_match,
    unused_patterns,
)
from thalweg.rules import Rule
from thalweg.rules.checks import require
from thalweg.settings import WHOLE_STEP, RuleOptions, option_names

#: A pattern, and what holds for the parameters that it is the first to match. None: it matches none.
Entry: TypeAlias = tuple[Pattern | None, RuleOptions]


@dataclass(frozen=True)
class Chosen:
    """The pattern of parameters that were chosen by name for a role."""

    role: str
    names: frozenset[str]
    #: What to tell of some of them, by name.
    hints: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __call__(self, name: str, parameter: Tensor) -> bool:
        return name in self.names

    def __repr__(self) -> str:
        return f"<{self.role}>"


class Rules:
    """The rules that an optimizer steps by, each with its options, for the parameters that its pattern chooses.

    An optimizer of one rule is a mixture of one entry. overrides: those that come first in every entry.
    """

    def __init__(self, entries: Iterable[Entry], overrides: OverrideList = ()) -> None:
        self.entries, self.overrides_of_all = list(entries), overrides

    @classmethod
    def mix(cls, entries: Any, whole: Mapping[str, Any], overrides: Overrides) -> Rules:
        """A mixture, checked. whole: options of the whole step."""
        wanted = (
            "a mixture is a list of (pattern, options), such as "
            "[('*.weight', Kron.options(lr=3e-4)), ('*', AdamW.options(lr=3e-4))]"
        )
        rules = cls((), check_overrides(overrides))
        for pattern, options in check_entries(entries, RuleOptions, wanted):
            with say_where(f"entry {pattern!r}"):
                rules.add(pattern, options, whole)
        return rules

    def add(self, pattern: Pattern | None, options: RuleOptions, whole: Mapping[str, Any]) -> None:
        """Add an entry. whole: options of the whole step."""
        rule = options.rule
        if any(known.rule is not rule and known.rule.__name__ == rule.__name__ for _, known in self.entries):
            raise OptionError(f"two rules are named {rule.__name__}: checkpoints need names that differ")
        overrides = (*self.overrides_of_all, *options.overrides)
        options = RuleOptions(rule, {**options.given, **whole}, options.variant, overrides, options.lr)
        options.validate_lr(options.lr)
        self.entries.append((pattern, options))

    @property
    def are_mixed(self) -> bool:
        return len(self.entries) > 1

    def at(self, place: Any) -> RuleOptions:
        """The options of an entry, which a group names by its place."""
        if place not in range(len(self.entries)):
            raise OptionError(
                f"entry={place!r} in a parameter group is no entry of this optimizer, which has {len(self.entries)}: "
                "leave it out of groups that come from another mixture"
            )
        options: RuleOptions = self.entries[place][1]
        return options

    @property
    def overrides(self) -> OverrideList:
        """The overrides of all entries."""
        return tuple(override for _, options in self.entries for override in options.overrides)

    def find_place(self, rule: Any, wanted: int | None) -> int:
        """The place of a rule's entry, by its name: the wanted one, as of a group that an optimizer had before."""
        names = [options.rule.__name__ for _, options in self.entries]
        if rule not in names:
            raise OptionError(
                f"rule={rule!r} is not a rule of this optimizer, which has {', '.join(dict.fromkeys(names))}: give "
                "options, such as AdamW.options(lr=1e-3)"
            )
        is_wanted = wanted is not None and self.at(wanted).rule.__name__ == rule
        return wanted if is_wanted else names.index(rule)  # type: ignore[return-value]

    def owners(self) -> dict[str, str]:
        """By each option of the rules, the name of one that has it."""
        return {name: options.rule.__name__ for _, options in self.entries for name in option_names(options.rule)}

    def find_unused(self, stepped: Sequence[tuple[str, Any, int]]) -> tuple[list[Pattern], list[Pattern]]:
        """The patterns of overrides that match no parameter of their entries, and of entries without parameters.

        stepped: the name of each parameter, the parameter, and the place of its entry.
        """
        of_all, idle = len(self.overrides_of_all), list[Pattern]()
        named = [(name, parameter) for name, parameter, _ in stepped]
        unused = unused_patterns([pattern for pattern, _ in self.overrides_of_all], named)
        for place, (pattern, options) in enumerate(self.entries):
            members = [(name, parameter) for name, parameter, home in stepped if home == place]
            unused += unused_patterns([pattern for pattern, _ in options.overrides[of_all:]], members)
            if self.are_mixed and pattern is not None and not members:
                idle.append(pattern)
        return unused, idle


def check_own(rule: type[Rule] | None, options: Mapping[str, Any]) -> type[Rule]:
    """Refuse options of the whole step, which cannot belong to one rule of several."""
    if rule is None:
        raise OptionError("options() is for the class of one rule, such as AdamW.options(lr=1e-3)")
    for name in WHOLE_STEP:
        require(name not in options, f"{name} concerns the whole step: give it to the mixture, not to one of its rules")
    return rule


def check_chosen(entries: Sequence[Entry], pairs: Sequence[tuple[str, Tensor]]) -> None:
    """Refuse parameters that are not of the model whose parameters were chosen by name."""
    chosen = [pattern for pattern, _ in entries if isinstance(pattern, Chosen)]
    rules = dict.fromkeys(repr(options.rule.__name__) for _, options in entries)
    for name, p in pairs:
        if chosen and first_match(entries, name, p) is None:
            raise ParameterError(
                f"parameter {name!r} is not of the model that this mixture was made for: say which rule steps it, as "
                f'"rule": {" or ".join(rules)} in its parameter group'
            )
