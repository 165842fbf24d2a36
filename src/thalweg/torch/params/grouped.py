"""A torch optimizer as far as it needs no state: groups of parameters, and what holds for each."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from thalweg.errors import OptionError, ParameterError, UnusedOverrideWarning
from thalweg.given import OverrideList, Pattern, plain
from thalweg.rules import Rule
from thalweg.rules.checks import require
from thalweg.settings import Entry, Settings, option_names
from thalweg.torch.params.checks import check_parameter, reason_against_flat
from thalweg.torch.params.groups import EngineName, GroupSettings, check_group, defaults_of, to_plain
from thalweg.torch.params.idle import Idleness, warn_if_used_up
from thalweg.torch.params.members import Members, check_names, named, unused_patterns
from thalweg.torch.params.rates import Rate, check_rate, rate_given, rate_shown

Params: TypeAlias = Iterable[Any]

#: Options that are decided for all groups together.
JOINT = ("max_grad_norm", "on_nonfinite")
#: What a group holds beside options, in lists.
MEMBERS = ("params", "param_names")


class GroupedOptimizer(torch.optim.Optimizer):
    """Groups of parameters with options that are checked."""

    #: What it steps by; a mixture has several rules, and none here.
    rule: ClassVar[type[Rule]]
    _wanted_engine: EngineName

    def __init__(
        self,
        params: Params,
        entries: list[Entry],
        defaults: dict[str, Any],
    ) -> None:
        self._remember(entries)
        super().__init__(params, defaults)

    def _remember(self, entries: list[Entry]) -> None:
        self._entries = entries
        self._group_settings = GroupSettings(entries)
        self._members = Members()
        self._reported = False
        self._values: list[Any] = []
        self._settings: list[Settings] = []
        self._idleness = Idleness()

    def _rule_of(self, group: Mapping[str, Any]) -> type[Rule]:
        """What a group is stepped by."""
        return self._group_settings.entry_of(group).rule

    @property
    def _overrides(self) -> OverrideList:
        """Those of all rules."""
        return tuple(each for _, entry in self._entries for each in entry.settings.overrides)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with options of its own; everything is checked before anything is added."""
        if not isinstance(param_group, dict):
            raise TypeError(f"a parameter group must be a dict, got {type(param_group).__name__}")
        entry = self._group_settings.entry_of(param_group)
        check_group(entry.rule, param_group)
        given = {name: plain(param_group[name]) for name in option_names(entry.rule) if name in param_group}
        for name in JOINT:
            if given.get(name, self.defaults[name]) != self.defaults[name]:
                raise OptionError(f"{name} concerns the whole step and cannot differ between groups")
        own = {**defaults_of(entry), **self.defaults}
        settings = self._group_settings.made({**own, **param_group, **given})
        rate = {}
        if "lr" in param_group:
            check_rate(param_group["lr"])
            settings.base.rule.validate_lr(plain(param_group["lr"]))
            rate = rate_shown(settings.base.rule, param_group["lr"])
            rate.update({key: param_group[key] for key in rate if key == "lr_is_scale" and key in param_group})
        before = len(self.param_groups)
        super().add_param_group({**own, **param_group, **given, **rate})
        for group in self.param_groups[before:]:
            options = to_plain(group)
            group.clear()
            group.update(options)
        try:
            check_names(self.param_groups, self._overrides)
            for name, p in self._named(before):
                check_parameter(name, p, self._against_flat(before))
                if p.requires_grad:
                    settings.of(name, p)[0].rule.check_shape(name, tuple(p.shape))
        except (OptionError, ParameterError):
            del self.param_groups[before:]
            raise
        if not self.param_groups[before]["params"]:
            warn_if_used_up(param_group["params"], f"parameter group {before}")
        self._reported = False
        self._members.note_shapes(self.param_groups)

    def _places(self) -> dict[Tensor, tuple[str, int]]:
        """The name and the group of every parameter. What was remembered by address is dropped if they have changed."""
        if self._members.changed(self.param_groups, self._against_flat):
            check_names(self.param_groups, self._overrides)
            self._forget_memory()
        return self._members.places

    def _forget_memory(self) -> None:
        """Drop what is known by the address of a parameter: nothing, as long as there is no state."""

    def _against_flat(self, index: int) -> str:
        """Why the parameters of a group cannot be stepped as one vector; "" if they can."""
        group = self.param_groups[index]
        settings = self._checked_settings(index, group)
        return reason_against_flat(settings.base.rule, group, settings.overrides)

    def _report_unused(self) -> None:
        """Warn, once, of overrides and of entries that match no parameter."""
        if not self._reported:
            self._reported = True
            for what, unused in zip(("overrides", "entries of the mixture"), self._unused(), strict=True):
                if unused:
                    message = f"{what} that match no parameter: {', '.join(map(repr, unused))}"
                    warnings.warn(message, UnusedOverrideWarning, stacklevel=7)

    def _unused(self) -> tuple[list[Pattern], list[Pattern]]:
        """The patterns of overrides that match no parameter, and those of entries."""
        homes = [(name, p, self.param_groups[index].get("entry", 0)) for name, p, index in self._homes()]
        return unused_patterns(self._entries, homes)

    def _named(self, first_group: int = 0) -> Iterator[tuple[str, Tensor]]:
        """Every parameter with its name."""
        return named(self.param_groups, first_group)

    def parameters(self) -> Iterator[Tensor]:
        """Every parameter, in the order of the groups."""
        return (p for _, p in self._named())

    @property
    def num_parameters(self) -> int:
        return sum(len(group["params"]) for group in self.param_groups)

    @property
    def lr(self) -> Any:
        """The learning rate of all groups; setting it sets it for all."""
        rates = [group["lr"] for group in self.param_groups]
        if any(rate is not rates[0] and rate != rates[0] for rate in rates):
            raise OptionError(f"groups have different learning rates, {rates}: read them from param_groups")
        return rates[0]

    @lr.setter
    def lr(self, value: Rate) -> None:
        for index, group in enumerate(self.param_groups):
            settings = self._group_settings.of(index, group)
            check_rate(value)
            settings.base.rule.validate_lr(plain(value))
        for group in self.param_groups:
            if value is None:
                group.update(rate_shown(self._group_settings.made(group).base.rule, None))
            else:
                group["lr"] = value if isinstance(value, Tensor) else plain(value)

    def _homes(self) -> Iterator[tuple[str, Tensor, int]]:
        """Every parameter with its name and the index of its group."""
        groups = [index for index, group in enumerate(self.param_groups) for _ in group["params"]]
        return ((name, p, index) for (name, p), index in zip(self._named(), groups, strict=True))

    def _rate(self, group: Mapping[str, Any]) -> tuple[Rate, float]:
        """What the rule is given as lr, and what multiplies the step size that it makes of it."""
        return rate_given(group, shown_only=self._is_shown_only(group))

    def _is_shown_only(self, group: Mapping[str, Any]) -> bool:
        """Whether a scheduler writes the step size into a group for people to read, and not for us.

        ``AdafactorSchedule`` of transformers does, and takes ``initial_lr`` away, which all others leave in groups.
        """
        scheduled = getattr(self.step, "_wrapped_by_lr_sched", False)
        return bool(group.get("lr_is_scale")) and scheduled and "initial_lr" not in group

    def _current_settings(self) -> list[Settings]:
        """The settings of all groups; looked at anew only if a value in one of them was replaced."""
        values = list(chain.from_iterable(map(dict.values, self.param_groups)))
        if len(values) != len(self._values) or not all(map(operator.is_, values, self._values)):
            self._settings = [self._checked_settings(i, group) for i, group in enumerate(self.param_groups)]
            # a list may be edited where it is
            edited = any(type(v) is list for group in self.param_groups for k, v in group.items() if k not in MEMBERS)
            self._values = [] if edited else values
        return self._settings

    def _checked_settings(self, index: int, group: Mapping[str, Any]) -> Settings:
        try:
            settings = self._group_settings.of(index, group)
            check_rate(group["lr"])
            settings.base.rule.validate_lr(plain(group["lr"]))
            for name in JOINT:
                require(
                    group[name] == self.param_groups[0][name],
                    f"{name} concerns the whole step and cannot differ between groups",
                )
        except OptionError as error:
            raise OptionError(f"parameter group {index}: {error}") from None
        return settings
