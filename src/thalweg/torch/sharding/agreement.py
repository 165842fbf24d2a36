"""Whether ranks agree on what they step, asked before any of them waits for the others' numbers.

Ranks that were given other parameters or options would send messages that do not fit together, and wait for ever or
compute nonsense. So each tells a digest of what it was given, before its first step and whenever that changes in kind,
and where digests differ all of them say what the difference is.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import operator
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from thalweg.errors import ParameterError
from thalweg.given import OverrideList
from thalweg.rules import Rule
from thalweg.settings import option_names
from thalweg.torch.sharding.collectives import gather_objects, largest_words
from thalweg.torch.sharding.shards import MeshGroup, is_distributed, part_of
from thalweg.torch.sharding.sharing import Sharing

#: What thalweg reads of a group beside the options of its rule.
BESIDE_OPTIONS = ("lr", "lr_is_scale", "capturable", "rule", "rule_version", "entry", "layout")
#: What is compared of a digest, as whole numbers of 32 bits that no device rounds.
WORDS = 4


class Agreement:
    """What the ranks of one optimizer have agreed on so far."""

    def __init__(self, sharing: Sharing) -> None:
        self.sharing = sharing
        self.places: Mapping[Tensor, tuple[str, int]] = {}
        self.distributed: list[tuple[str, Tensor, int]] = []
        self.reached: set[Hashable] = set()
        #: All values of groups when ranks agreed last; None: they have to agree first.
        self.values: list[Any] | None = None

    def holds(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Whether the same groups have options of the kinds that ranks agreed on last."""
        if not self.distributed or self.values is None:
            return not self.distributed
        now, then = list(chain.from_iterable(map(dict.values, groups))), self.values
        pairs = zip(now, then, strict=False)
        same = all(map(operator.is_, now, then)) or all(kind_of(one) == kind_of(other) for one, other in pairs)
        return same and len(now) == len(then)

    def forget(self) -> None:
        """Ask again before the next step."""
        self.reached.clear()
        self.values = None

    def reach(
        self,
        rules: Sequence[type[Rule]],
        places: Mapping[Tensor, tuple[str, int]],
        groups: Sequence[dict[str, Any]],
        overrides: OverrideList,
        *,
        one_by_one: bool,
    ) -> None:
        """Ask, if something is new; raise on every rank if they differ. Unsharded models send nothing.

        rules: those of the groups.
        """
        if places is not self.places:
            self.places, self.reached = places, set()
            shared = [self.sharing.group is not None and rule.needs_whole for rule in rules]
            self.distributed = [(name, p, i) for p, (name, i) in places.items() if is_distributed(p) or shared[i]]
        if not self.distributed:
            return
        # one by one, ranks are at the same parameter at different times, and have gradients for others or not
        present = b"" if one_by_one else bytes(p.grad is not None for _, p, _ in self.distributed)
        self.values = None
        news = present, tuple(kinds(own_options(*pair)) for pair in zip(rules, groups, strict=True))
        if news not in self.reached:
            divided = [(name, p, index, self.groups_of(name, p, rules[index])) for name, p, index in self.distributed]
            divided = [entry for entry in divided if entry[-1]]
            described = describe(rules, divided, groups, overrides, gradients=not one_by_one)
            lines = [f"divide_work={self.sharing.divide_work}", *described]
            check_agreement(lines, [group for *_, across in divided for group in across])
            self.reached.add(news)
        self.values = list(chain.from_iterable(map(dict.values, groups)))

    def groups_of(self, name: str, p: Tensor, rule: type[Rule]) -> tuple[MeshGroup, ...]:
        """The groups over which a parameter may send messages."""
        shares = rule.needs_whole and self.sharing.divide_work is not False
        return part_of(name, p).across(None) + (self.sharing.groups_of(p) if shares else ())


def check_agreement(description: Sequence[str], groups: Sequence[MeshGroup]) -> None:
    """Compare what ranks would do, line by line; raise on all of them where it is not the same.

    groups: those over which this rank will send messages.
    """
    # in one order on every rank, even where that of parameters differs
    asked = list(dict.fromkeys(sorted(groups, key=lambda group: group.order)))
    digest = hashlib.sha256("\n".join(description).encode()).digest()
    words = [int.from_bytes(digest[4 * i : 4 * i + 4], "big") for i in range(WORDS)]
    largest = torch.tensor([*words, *(-word for word in words)])
    for _, group in itertools.product(asked, asked):  # once more for every group: news reach ranks that share none
        largest = largest_words(largest, group)
    if not torch.equal(largest[:WORDS], -largest[WORDS:]):
        raise ParameterError(difference(everyone(description, asked)))


def everyone(description: Sequence[str], groups: Sequence[MeshGroup]) -> dict[int, Sequence[str]]:
    """The description of each rank, by its number."""
    known: dict[int, Sequence[str]] = {torch.distributed.get_rank(): description}
    for _, group in itertools.product(groups, groups):
        theirs = gather_objects(known, group.process_group)
        known = {rank: lines for descriptions in theirs for rank, lines in descriptions.items()}
    return dict(sorted(known.items()))


def difference(known: Mapping[int, Sequence[str]]) -> str:
    """One sentence about the first line that is not the same for all."""
    (first, lines), *others = known.items()
    for rank, theirs in others:
        for one, other in itertools.zip_longest(lines, theirs, fillvalue="nothing more"):
            if one != other:
                return (
                    f"ranks differ in what they step: rank {first} has {one}, and rank {rank} has {other}; "
                    "all ranks need the same parameters, in the same order, and the same options"
                )
    raise AssertionError("digests differ, and what they stand for does not")


def describe(
    rules: Sequence[type[Rule]],
    divided: Sequence[tuple[str, Tensor, int, Any]],
    groups: Sequence[Mapping[str, Any]],
    overrides: OverrideList,
    *,
    gradients: bool,
) -> Iterator[str]:
    """A line for each thing that must be the same on every rank. Parameters that no messages are about may differ."""
    names = dict.fromkeys(rule.__name__ for rule in rules)
    yield f"the rule{'s' if len(names) > 1 else ''} {', '.join(names)}"
    entries = [f"{in_words(pattern)}: {in_words(dict(sorted(options.items())))}" for pattern, options in overrides]
    yield f"overrides of {', '.join(entries)}" if entries else "no overrides"
    for index in sorted({index for _, _, index, _ in divided}):
        options = own_options(rules[index], groups[index])
        yield from (f"{key}={in_words(value)} in group {index}" for key, value in sorted(options.items()))
    for name, p, index, _ in divided:
        placements = ", ".join(map(str, getattr(p, "placements", ("a plain tensor",))))
        mesh = " x ".join(map(str, p.device_mesh.shape)) if is_distributed(p) else "all"  # type: ignore[attr-defined]
        missing = ", without a gradient" if gradients and p.grad is None else ""
        yield (
            f"parameter {name!r} in group {index}, of shape {tuple(p.shape)} and dtype {p.dtype}, "
            f"placed as {placements} over {mesh} ranks{missing}"
        )


def in_words(value: Any) -> str:
    """An option in words that are the same on every rank, whatever its address or device."""
    if isinstance(value, Tensor):
        return "a tensor"
    if isinstance(value, dict):
        return ", ".join(f"{key}={in_words(option)}" for key, option in value.items())
    return "a function" if callable(value) else repr(value)


def own_options(rule: type[Rule], group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group that thalweg reads; keys of other tools may differ between ranks."""
    names = own_names(rule)
    return {key: value for key, value in group.items() if key in names}


@functools.cache
def own_names(rule: type[Rule]) -> frozenset[str]:
    return frozenset({*option_names(rule), *BESIDE_OPTIONS})


def kinds(options: Mapping[str, Any]) -> tuple[Hashable, ...]:
    return tuple((name, kind_of(value)) for name, value in options.items())


def kind_of(value: Any) -> Hashable:
    """An option itself, unless it is a number, which schedules change at every step."""
    return type(value).__name__ if isinstance(value, (float, tuple, list, Tensor)) else value
