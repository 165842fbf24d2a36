"""Which tensors the groups of an optimizer hold, looked at before every step.

Groups are the truth. Trainers exchange parameters inside a group (FSDP2 in accelerate), move them to another group, or
replace one together with its state (densification in Gaussian splatting), without notice.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.arrays import Shape
from thalweg.errors import OptionError, ParameterError
from thalweg.given import OverrideList, Pattern, Standard, matches
from thalweg.settings import Entry
from thalweg.torch.params.checks import check_exchanged, check_parameter

Groups = Sequence[Mapping[str, Any]]


def check_given(params: Any) -> None:
    """Refuse a model, or parameters in a dictionary, and say what to pass instead."""
    if isinstance(params, nn.Module):
        raise ParameterError("params is a model: pass model.named_parameters() or model.parameters()")
    if isinstance(params, Mapping):
        if "params" in params:
            raise ParameterError("params is one parameter group: pass a list of groups, [group]")
        raise ParameterError("params is a dictionary: pass params.items() or model.named_parameters()")


def names_of(group: Mapping[str, Any]) -> list[str] | None:
    """The names of a group's parameters, unless they were left behind by code that replaced parameters alone."""
    names = group.get("param_names")
    return names if names and len(names) == len(group["params"]) else None


def named(groups: Groups, first: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Every parameter from this group on, with its name; those without one are named by their position."""
    position = sum(len(group["params"]) for group in groups[:first])
    for group in groups[first:]:
        params = group["params"]
        names = names_of(group) or [str(position + i) for i in range(len(params))]
        position += len(params)
        yield from zip(names, params, strict=True)


def check_names(groups: Groups, overrides: OverrideList) -> None:
    """Refuse overrides by name for parameters that have none, and names that two of them have."""
    by_name = [pattern for pattern, _ in overrides if not callable(pattern)]
    if by_name and any(group["params"] and names_of(group) is None for group in groups):
        raise OptionError(
            f"overrides by name ({by_name[0]!r}) need a name for every parameter: pass model.named_parameters(), "
            "or use a function of (name, parameter) as the pattern"
        )
    names = [name for name, _ in named(groups)]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ParameterError(
            f"two parameters are named {twice!r}: give names that differ, as model.named_parameters() has them"
        )


def unused_patterns(
    entries: Sequence[Entry], homes: Collection[tuple[str, Tensor, int]]
) -> tuple[list[Pattern], list[Pattern]]:
    """The patterns of overrides that match no parameter of their entries, and those of entries without parameters.

    homes: every parameter with its name and the place of its entry.
    """
    used, unused, idle = set[int](), dict[int, Pattern](), []
    for place, (pattern, entry) in enumerate(entries):
        pairs = [(name, p) for name, p, home in homes if home == place]
        if pattern is not None and not pairs:
            idle.append(pattern)
        for own, _ in entry.settings.overrides:  # those of all entries are one object in each
            if isinstance(own, Standard) or any(matches(own, *pair) for pair in pairs):
                used.add(id(own))
            else:
                unused[id(own)] = own
    return [pattern for key, pattern in unused.items() if key not in used], idle


class Members:
    """The parameters of all groups, as they were at the last look."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.names: list[list[str] | None] = []
        self.params: list[Tensor] = []
        #: By the address of a group: tools take empty groups away. Parameters themselves are not kept before a first
        #: step, since trainers want to free them.
        self.shapes: dict[int, list[Shape]] = {}
        #: The name and the group of every parameter.
        self.places: dict[Tensor, tuple[str, int]] = {}

    def note_shapes(self, groups: Groups) -> None:
        """Remember what groups hold; one that is empty for now, as DeepSpeed has it between steps, held it before."""
        shapes = {id(group): [tuple(p.shape) for p in group["params"]] for group in groups}
        self.shapes = {key: own or self.shapes.get(key, []) for key, own in shapes.items()}

    def changed(self, groups: Groups, against_flat: Callable[[int], str]) -> bool:
        """Look again; on any error nothing is taken over. against_flat: why a group cannot be stepped as one vector."""
        # whole lists, compared by C code: this is asked at every step
        sizes = [len(group["params"]) for group in groups]
        names = [group.get("param_names") for group in groups]
        params = list(chain.from_iterable(group["params"] for group in groups))
        if sizes == self.sizes and names == self.names and all(map(operator.is_, params, self.params)):
            return False
        self.places = self.found(groups, [against_flat(index) for index in range(len(groups))])
        self.sizes, self.params = sizes, params
        self.note_shapes(groups)
        self.names = [None if own is None else list(own) for own in names]
        return True

    def found(self, groups: Groups, against_flat: Sequence[str]) -> dict[Tensor, tuple[str, int]]:
        for index, (group, reason) in enumerate(zip(groups, against_flat, strict=True)):
            tensors = [p for p in group["params"] if isinstance(p, torch.Tensor)]
            check_exchanged(index, self.shapes.get(id(group), []), tensors, reason)
        known = set(map(id, self.params))
        homes = chain.from_iterable([index] * len(group["params"]) for index, group in enumerate(groups))
        places: dict[Tensor, tuple[str, int]] = {}
        for (name, p), index in zip(named(groups), homes, strict=True):
            if not isinstance(p, torch.Tensor):
                raise ParameterError(f"parameter {name!r} in group {index} must be a tensor, got {type(p).__name__}")
            if p in places:
                raise ParameterError(
                    f"parameter {name!r} in group {index} is also {places[p][0]!r} in group {places[p][1]}: "
                    "each parameter may appear only once"
                )
            if id(p) not in known:
                check_parameter(name, p, against_flat[index])
            places[p] = name, index
        return places
