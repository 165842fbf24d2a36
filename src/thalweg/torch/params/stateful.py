"""A torch optimizer as far as it needs no step: the state of its parameters, from the first zeros to checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from thalweg.errors import OptionError, StateError, read_as
from thalweg.exchange import warn_converted
from thalweg.given import plain
from thalweg.rules.entries import Count
from thalweg.settings import Entry, Setting, Settings
from thalweg.torch.offload.host import HostState, moved, on_host
from thalweg.torch.params.checkpoints import (
    check_entries,
    check_is_state,
    check_same_rules,
    check_sizes,
    in_own_order,
    restored,
    shapes_of,
    warn_if_made_otherwise,
)
from thalweg.torch.params.explain import Explanation, explained, explained_group, source_of
from thalweg.torch.params.grouped import GroupedOptimizer
from thalweg.torch.params.groups import defaults_of, loaded_group
from thalweg.torch.params.rates import check_rate
from thalweg.torch.params.states import (
    as_found,
    convert_count,
    converted_entries,
    expected_entries,
    first_entries,
    is_count_tensor,
)
from thalweg.torch.sharding.agreement import in_words


class StatefulOptimizer(GroupedOptimizer):
    """Groups of parameters with state that fits their options, and is restored as it was saved."""

    _host: HostState

    # What a step sends to the host is on its way when the step returns: whoever looks at state waits for it.
    @property
    def state(self) -> Any:
        """By parameter, what is kept for it between steps. Reading it waits for what is on its way to the host."""
        self._host.wait_to_read()
        return self.__dict__["state"]

    @state.setter
    def state(self, state: Any) -> None:
        self.__dict__["state"] = state

    def _remember(self, entries: list[Entry]) -> None:
        super()._remember(entries)
        #: By the address of a parameter: what holds for it, as it was found of these settings for this shape.
        self._resolved: dict[int, tuple[Settings, Setting, torch.Size]] = {}
        self._conversion_told = False
        #: Whether a state is being loaded that was kept under other options than those that come with it.
        self._imports = False

    def _forget_memory(self) -> None:
        self._resolved.clear()

    def _setting(self, settings: Settings, name: str, p: Tensor) -> Setting:
        found = self._resolved.get(id(p))
        if found is None or found[0] is not settings or found[2] != p.shape:
            setting, _ = settings.of(name, p)
            # schedulers that cycle momentum change numbers at every step
            if found is None or found[1].kind != setting.kind or found[2] != p.shape:
                self._fit_state(name, p, setting)
            self._resolved[id(p)] = found = settings, setting, p.shape
        return found[1]

    def _fit_state(self, name: str, p: Tensor, setting: Setting) -> None:
        """Refuse options that do not go with a parameter or its state; keep the state as they ask for."""
        setting.rule.check_shape(name, tuple(p.shape))
        state = self.state.get(p)
        as_kept = as_found(setting, p, {key: e for key, e in state.items() if key != "step"}) if state else setting
        self._check_state(name, p, as_kept)
        if state and as_kept is not setting:
            self._convert_state(name, p, setting, state)

    def _check_state(self, name: str, p: Tensor, setting: Setting) -> None:
        """Refuse options that need other state than the parameter has."""
        found = shapes_of({key: entry for key, entry in self.state.get(p, {}).items() if key != "step"})
        wanted = shapes_of(expected_entries(setting, p, name))
        if p in self.state and self.state[p] and found != wanted:
            raise StateError(
                f"the state of {name!r} does not fit its options: they need {wanted}, and the state has {found}; "
                "restore the options that the state was made with, or drop it with clear_state()"
            )

    def _convert_state(self, name: str, p: Tensor, setting: Setting, state: dict[str, Tensor]) -> None:
        """Keep state in the codes that its options ask for; that is told once."""
        self._host.wait()
        hosted = self._host.keys(name, p, setting.rule_at(1), list(state))
        beside = {key: moved(state[key], p.device) for key in hosted}
        made = converted_entries(setting, p, name, {**state, **beside})
        if not self._conversion_told:
            self._conversion_told = True
            warn_converted(name, state, made)
        state.clear()
        state.update(made)
        self._move_to_host(name, p, setting, state)

    def _move_to_host(self, name: str, p: Tensor, setting: Setting, state: dict[str, Tensor]) -> None:
        """Move what belongs there; the next step pins it."""
        keys = self._host.keys(name, p, setting.rule_at(1), list(state))
        state.update({key: on_host(state[key]) for key in keys})

    def _state(self, name: str, p: Tensor, setting: Setting, group: Mapping[str, Any]) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[p]
        if not state:
            place = self._place_of_counts(p, group)
            state["step"] = torch.zeros((), dtype=torch.float32, device=place)
            state.update(first_entries(p, setting, name))
            if p.device.type != "meta":  # counts are beside the step, so that the host can tell without a wait
                state.update({key: state[key].to(place) for key in setting.rule.keys(tuple(p.shape), Count)})
            self._move_to_host(name, p, setting, state)
        return state

    def _convert_counts(self, places: Mapping[Tensor, tuple[str, int]]) -> None:
        """Make tensors of counts of steps that users have written into state as plain numbers."""
        states = self.state
        for p, (name, index) in places.items():
            state = states.get(p)
            if state and not is_count_tensor(step := state.get("step")):
                place = self._place_of_counts(p, self.param_groups[index])
                state["step"] = convert_count(name, step).to(place)

    def _place_of_counts(self, p: Tensor, group: Mapping[str, Any]) -> torch.device:
        """Where counts live: with the host, unless the device alone may know them."""
        on_device = group["capturable"] or group["on_nonfinite"] == "skip"
        return p.device if on_device else torch.device("cpu")

    def make_state(self) -> None:
        """Make the state of every parameter that has none, as it is before the first step.

        Checkpoint loaders that find no state make it by a step, which counts as the first.
        """
        with torch.no_grad():
            for name, p, index in self._homes():
                if p.requires_grad:
                    settings = self._checked_settings(index, self.param_groups[index])
                    self._state(name, p, self._setting(settings, name, p), self.param_groups[index])

    def _treatments(self) -> Iterator[tuple[Tensor, Setting, Any]]:
        """Every parameter that is stepped, what holds for it, and its learning rate."""
        for name, p, index in self._homes():
            if p.requires_grad:
                group = self.param_groups[index]
                setting, _ = self._checked_settings(index, group).of(name, p)
                setting.rule.check_shape(name, tuple(p.shape))
                yield p, setting, self._rate(group)[0]

    def explain(self, *, code: bool = False) -> Explanation:
        """How every parameter will be treated, what its state will cost, and what looks like a mistake.

        Parameters that are frozen (``requires_grad=False``) are counted by group and have no row. code: show the source
        of the fused code too, once for each treatment.
        """
        rows, sources = [], {}
        beside: list[dict[str, None]] = [{} for _ in self.param_groups]
        for name, p, index in self._homes():
            if p.requires_grad:
                group = self.param_groups[index]
                setting = self._setting(self._checked_settings(index, group), name, p)
                lr, factor = self._rate(group)
                reason = self._host.reason_against(name, p, setting.rule_at(1)) if self._host.wanted else ""
                if reason:
                    beside[index][reason] = None
                rated = replace(setting, lr_scale=setting.lr_scale * factor)
                hint = getattr(self._entries[group.get("entry", 0)][0], "hints", {}).get(name, "")
                rows.append(explained(name, p, rated, lr, is_hosted=self._host.wanted and not reason, hint=hint))
                if code:
                    title = f"{rows[-1].rule}, {rows[-1].treatment}, {rows[-1].dtype} on {p.device.type}:"
                    if title not in sources:
                        sources[title] = source_of(setting, p, has_lr=lr is not None)
        several = len({row.rule for row in rows}) > 1
        groups = [
            explained_group(
                group,
                shown_only=self._is_shown_only(group),
                rule=group["rule"] if several else "",
                beside=list(reasons),
            )
            for group, reasons in zip(self.param_groups, beside, strict=True)
        ]
        unused, idle = self._unused()
        return Explanation(rows, unused, groups, sources, idle)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state. State keeps the dtype it was saved in; on any error nothing is changed."""
        rules = [self._rule_of(group) for group in self.param_groups]
        check_is_state(rules, state_dict)
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        check_is_state(rules, state_dict)
        named = list(self._named())
        with read_as("this state"):
            state_dict["param_groups"] = in_own_order(state_dict["param_groups"], self.param_groups)
            check_sizes(state_dict, self.param_groups)
            check_same_rules(state_dict, rules)
            groups = [
                loaded_group(rule, saved, own, {**defaults_of(self._group_settings.entry_of(own)), **self.defaults})
                for rule, saved, own in zip(rules, state_dict["param_groups"], self.param_groups, strict=True)
            ]
            expected, counts, hosted = self._expected(groups, state_dict if self._imports else None)
            check_entries(state_dict, named, expected)
        state = restored(groups, state_dict, named, expected, counts, hosted, self._place_of_counts)
        warn_if_made_otherwise(state_dict, self._made_with())
        state_dict["param_groups"] = groups
        state_dict["state"] = {}  # which torch would cast to the dtypes of parameters
        pre, post = self._optimizer_load_state_dict_pre_hooks, self._optimizer_load_state_dict_post_hooks
        self._optimizer_load_state_dict_pre_hooks = type(pre)()
        self._optimizer_load_state_dict_post_hooks = type(post)()
        try:
            super().load_state_dict(state_dict)
        finally:
            self._optimizer_load_state_dict_pre_hooks, self._optimizer_load_state_dict_post_hooks = pre, post
        self.state.update(state)
        self._resolved.clear()
        self._members.note_shapes(self.param_groups)
        for finish in post.values():
            finish(self)

    def _load_imported(self, state_dict: dict[str, Any]) -> None:
        """Load a state that may be kept in other codes than the options that come with it have."""
        self._imports = True
        try:
            self.load_state_dict(state_dict)
        finally:
            self._imports = False

    def state_dict(self) -> dict[str, Any]:
        """The state of all parameters and the options of all groups, for :meth:`load_state_dict`."""
        saved = super().state_dict()
        if isinstance(saved, dict) and isinstance(saved.get("param_groups"), list):  # which hooks may have changed
            shown = [{"lr": 1.0} if self._is_shown_only(group) else {} for group in self.param_groups]
            beside = {"made_with": self._made_with()}
            saved["param_groups"] = [
                {**group, **own, **beside} for group, own in zip(saved["param_groups"], shown, strict=True)
            ]
        return saved

    def _made_with(self) -> str:
        """What a checkpoint remembers of the arguments that are not in groups."""
        entries = [f"({in_words(pattern)}, {in_words(dict(options))})" for pattern, options in self._overrides]
        return f"engine={self._wanted_engine!r}, overrides=[{', '.join(entries)}]"

    def _expected(
        self, groups: Sequence[Mapping[str, Any]], imported: Mapping[str, Any] | None
    ) -> tuple[dict[str, dict[str, Tensor]], dict[str, list[str]], dict[str, list[str]]]:
        """Ghosts of all states under the options of saved groups, which are checked on the way.

        With them the keys of counts, and those of entries that are kept on the host. imported: a state that may be kept
        in other codes than these options have.
        """
        entries: dict[str, dict[str, Tensor]] = {}
        counts, hosted = {}, {}
        places = iter([place for group in groups for place in group["params"]])
        try:
            made = [self._group_settings.made(group) for group in groups]
            for settings, group in zip(made, groups, strict=True):
                check_rate(group["lr"])
                settings.base.rule.validate_lr(plain(group["lr"]))
            for name, p, index in self._homes():
                setting, _ = made[index].of(name, p)
                if imported is not None and (found := imported["state"].get(next(places))):
                    setting = as_found(setting, p, {key: e for key, e in found.items() if isinstance(e, Tensor)})
                entries[name] = expected_entries(setting, p, name)
                counts[name] = setting.rule.keys(tuple(p.shape), Count)
                hosted[name] = self._host.keys(name, p, setting.rule_at(1), list(entries[name]))
        except OptionError as error:
            raise StateError(f"the options of this state are not valid: {error}") from None
        return entries, counts, hosted
