"""Runs that other libraries have started: the form of the tables of what can be continued, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from thalweg.errors import OptionError, StateError
from thalweg.rules import Rule
from thalweg.settings import Settings

#: From the name that a parameter has at the source to the one it has here. Names that a mapping lacks stay.
Rename: TypeAlias = Callable[[str], str] | Mapping[str, str]
#: Makes our options of the value of one of theirs and of the dtypes of a group.
Convert: TypeAlias = Callable[[Any, Sequence[Any]], dict[str, Any]]


def names(text: str) -> dict[str, str]:
    """Names there, each with the name here: "momentum trust_clip=clip" has the first in common."""
    pairs = (word.partition("=") for word in text.split())
    return {theirs: ours or theirs for theirs, _, ours in pairs}


@dataclass(frozen=True)
class Source:
    """An optimizer of another library whose runs can be continued."""

    name: str
    rule: type[Rule]
    #: The options that all of its groups have, and its keys of state, each with ours.
    options: Mapping[str, str]
    keys: Mapping[str, str]
    #: Options that have other values here.
    converted: Mapping[str, Convert] = field(default_factory=dict)
    #: Our options that make the rule equal whatever its groups say; "variant" among them.
    always: Mapping[str, Any] = field(default_factory=dict)
    #: Options of which one value alone can be continued. Groups of older versions may lack them.
    only: Mapping[str, Any] = field(default_factory=dict)
    #: Keys of state that every step makes anew.
    remade: Sequence[str] = ()
    #: Where it counts steps: with each parameter, in the group, or nowhere.
    counts: Literal["state", "group", "nowhere"] = "state"

    def is_like(self, group: Mapping[str, Any]) -> bool:
        """Whether a group has the options of this optimizer."""
        return {*self.options, *self.converted} <= group.keys()

    def check_group(self, group: Mapping[str, Any], beside: Sequence[str]) -> None:
        """Refuse keys of a group that are not known. beside: those that all groups may have."""
        counted = ("step",) if self.counts == "group" else ()
        self.check_keys("its groups have", group, (*self.options, *self.converted, *self.only), (*counted, *beside))

    def check_entries(self, what: str, entries: Mapping[str, Any]) -> None:
        """Refuse keys of state that are not known."""
        self.check_keys(f"{what} has", entries, (*self.keys,), ("step", *self.remade))

    def check_keys(self, said: str, keys: Iterable[Any], known: Sequence[str], beside: Sequence[str]) -> None:
        unknown = [key for key in keys if key not in (*known, *beside)]
        if unknown:
            raise StateError(
                f"{said} {unknown[0]!r}, and of {self.name} it is known what {', '.join(known)} are: without "
                f"{unknown[0]!r}, if it changes no numbers, this run can be continued"
            )

    def count_steps(self, what: str, entries: Mapping[str, Any], group: Mapping[str, Any]) -> int:
        """How many steps it has taken with a parameter: 1 if it does not count them."""
        step = {"state": entries.get("step"), "group": group.get("step"), "nowhere": 1}[self.counts]
        if step is None or int(step) != step or step < 1:
            raise StateError(f"{what} has no count of steps where {self.name} keeps it: {step!r}")
        return int(step)

    def settings(self, group: Mapping[str, Any], dtypes: Sequence[Any]) -> Settings:
        """Our options that make the rule equal to what a group asks for. dtypes: those of its parameters."""
        for key, value in self.only.items():
            if group.get(key, value) != value:
                told = f"{self.name} was run with {key}={group[key]!r}, which has no equal here"
                raise StateError(f"{told}: only runs with {key}={value!r} can be continued")
        wanted = {"maximize": False, **self.always, **{ours: group[theirs] for theirs, ours in self.options.items()}}
        for key, convert in self.converted.items():
            wanted |= convert(group[key], dtypes)
        variant = wanted.pop("variant", None)
        try:
            return Settings(self.rule, wanted, variant)
        except OptionError as error:
            raise StateError(f"{self.rule.__name__} cannot continue this run of {self.name}: {error}") from None


def recognize(table: Sequence[Source], groups: Sequence[Mapping[str, Any]], name: str | None) -> Source:
    """The optimizer that made a state, as its groups tell it or as it is named."""
    known = ", ".join(source.name for source in table)
    if name is not None and name not in known.split(", "):
        raise StateError(f"source={name!r} is not known: it must be one of {known}")
    like = [s for s in table if groups and name in (None, s.name) and all(map(s.is_like, groups))]
    if len(like) > 1:  # those with the same options differ in values that newer versions save
        like = [s for s in like if all(group.get(key, v) == v for group in groups for key, v in s.only.items())]
    if len(like) > 1:
        choices = " or ".join(f"source={source.name!r}" for source in like)
        raise StateError(f"the groups of this state do not tell which optimizer made it: pass {choices}")
    if not like:
        raise StateError(
            f"this is no state of {name or 'an optimizer that is known'}, by its options: known are {known}"
        )
    return like[0]


def check_rule(source: Any, rule: type[Rule]) -> None:
    """Refuse to continue with another rule than the one that equals the source."""
    if rule is not source.rule:
        raise StateError(f"{rule.__name__} cannot continue a run of {source.name}: {source.rule.__name__} can")


def rename_parameter(name: str, rename: Rename | None) -> str:
    """The name that a parameter of the source has here."""
    if rename is None:
        return name
    return rename.get(name, name) if isinstance(rename, Mapping) else rename(name)


@dataclass(frozen=True)
class Report:
    """What was taken from another optimizer's state. ``print`` shows it."""

    #: The optimizer whose run is continued, such as "torch.AdamW", and the rule that continues it.
    source: str
    rule: str
    #: How many parameters have state now, and the most steps that one of them has taken; 0 if the source counts none.
    parameters: int
    steps: int
    #: Options that the source does not save, so that they could not be compared, as they are here.
    untold: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        after = f"after {self.steps} steps" if self.steps else "whose steps are not counted there, and here from 1 on"
        lines = [f"{self.rule} continues a run of {self.source}: {self.parameters} parameters {after}"]
        if self.untold:
            given = ", ".join(f"{name}={value!r}" for name, value in self.untold.items())
            lines.append(f"not saved by {self.source}, so taken as constructed here: {given}")
        return "\n".join(lines)
