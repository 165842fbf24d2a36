"""Runs that other libraries have started: what both tables of them tell and refuse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

from thalweg.errors import StateError
from thalweg.exchange import list_names
from thalweg.given import differ
from thalweg.rules import Rule

#: From the name that a parameter has at the source to the one it has here. Names that a mapping lacks stay.
Rename: TypeAlias = Callable[[str], str] | Mapping[str, str]


@dataclass(frozen=True)
class Report:
    """What was taken from another optimizer's state, and what had to be made. ``print`` shows it."""

    #: The optimizer whose run is continued, such as "torch.AdamW", and the rule that continues it.
    source: str
    rule: str
    #: How many parameters have state now, and the most steps that one of them has taken; 0 if the source counts none.
    parameters: int
    steps: int
    #: Their keys of state, each with its key here.
    taken: Mapping[str, str] = field(default_factory=dict)
    #: Keys that the source does not save, each with how it begins here.
    made: Mapping[str, str] = field(default_factory=dict)
    #: Options that the source does not save and that could not be compared, as they are here.
    untold: Mapping[str, Any] = field(default_factory=dict)
    #: Parameters of a mixture that begin anew, since their rule is none that continues the source; each with its rule.
    begun: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        after = f" after {counted(self.steps, 'step')}" if self.steps else ""
        lines = [f"{self.rule} continues a run of {self.source}: {counted(self.parameters, 'parameter')}{after}"]
        if self.taken:
            pairs = (ours if theirs == ours else f"{theirs} as {ours}" for theirs, ours in self.taken.items())
            lines.append(f"taken: {', '.join(pairs)}")
        for how in dict.fromkeys(self.made.values()):
            keys = ", ".join(key for key, own in self.made.items() if own == how)
            lines.append(f"made: {keys} ({how})")
        if self.untold:
            given = ", ".join(f"{name}={value!r}" for name, value in self.untold.items())
            lines.append(f"not saved by {self.source}, so taken as constructed here: {given}")
        for rule in dict.fromkeys(self.begun.values()):
            names = [name for name, own in self.begun.items() if own == rule]
            lines.append(f"begun anew, by {rule}: {counted(len(names), 'parameter')} ({list_names(names)})")
        return "\n".join(lines)


def counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def rename_parameter(name: str, rename: Rename | None) -> str:
    """The name that a parameter of the source has here."""
    if rename is None:
        return name
    return rename.get(name, name) if isinstance(rename, Mapping) else rename(name)


def check_same_names(theirs: Sequence[str], ours: Sequence[str]) -> None:
    """Refuse names of the source, after renaming, that are not those of the optimizer; say which do not match."""
    twice = sorted(name for name, times in Counter(theirs).items() if times > 1)
    if twice:
        raise StateError(f"two parameters of the source would be named {list_names(twice)} here: correct rename=")
    lacking, unknown = sorted(set(ours) - set(theirs)), sorted(set(theirs) - set(ours))
    if lacking or unknown:
        raise StateError(
            f"the parameters do not match by name: the source lacks {list_names(lacking)}, and this optimizer lacks "
            f"{list_names(unknown)}; rename= takes a function or a mapping from their names to those here"
        )


def unlike(wanted: Rule, found: Rule, lr: Any, apart: AbstractSet[str]) -> Iterator[tuple[str, Any, Any]]:
    """Options in which two rules of one kind differ, with both values: all that have an effect, but for those apart."""
    idle = wanted.idle(lr)
    for option in fields(wanted):
        theirs, ours = getattr(wanted, option.name), getattr(found, option.name)
        if option.name not in apart and option.name not in idle and differ(theirs, ours):
            yield option.name, theirs, ours


def refused_option(source: str, name: str, option: str, theirs: Any, ours: Any, construct: str) -> StateError:
    """What to say of an option that differs between a source and the optimizer that is to continue its run."""
    return StateError(
        f"{source} stepped {name!r} with what is {option}={theirs!r} here, and this optimizer has {option}={ours!r}: "
        f"to continue the run, construct {construct}; to change an option on purpose, change it after the import"
    )
