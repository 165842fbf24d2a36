"""One optimizer for raw arrays that steps by several rules."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from thalweg.errors import OptionError, UnusedOverrideWarning
from thalweg.exchange import check_mixture
from thalweg.given import Overrides, Pattern, check_all_matched, check_overrides, first_match, matches
from thalweg.numpy.arrays import Arr, Name, pairs
from thalweg.numpy.base import Optimizer, readable
from thalweg.numpy.checks import Rate, checked_rate
from thalweg.numpy.stepping import Engine
from thalweg.rules import Rule
from thalweg.rules.checks import check_flag
from thalweg.settings import Entry, RuleOptions, Settings, checked_entries

Entries: TypeAlias = Sequence[tuple[Pattern, RuleOptions]]


class Mixture(Optimizer):
    """Steps some arrays by one rule and others by another.

    entries: a list of (pattern, options). A pattern is a glob, a compiled regular expression or a function of a name
    and an array; the first that matches a parameter decides. ``options()`` of an optimizer's class makes options.
    overrides: for the parameters of all entries. The other arguments hold for the whole step.

    >>> import numpy as np
    >>> from thalweg.numpy import SGD, AdamW
    >>> optimizer = Mixture([("*.weight", AdamW.options(lr=0.1, weight_decay=0.0)), ("*", SGD.options(lr=0.5))])
    >>> params = {"dense.weight": np.ones((2, 2)), "dense.bias": np.ones(2)}
    >>> optimizer.step(params, {name: np.ones_like(p) for name, p in params.items()})
    >>> params["dense.weight"].round(3).tolist(), params["dense.bias"].tolist()
    ([[0.9, 0.9], [0.9, 0.9]], [0.5, 0.5])
    """

    def __init__(
        self,
        entries: Entries,
        *,
        overrides: Overrides = (),
        maximize: bool = False,
        max_grad_norm: float | None = None,
        on_nonfinite: Literal["propagate", "skip", "raise"] = "propagate",
        seed: int = 0,
        global_step: bool = False,
        engine: Engine = "auto",
    ) -> None:
        self._given: dict[str, Any] = dict(
            overrides=overrides,
            maximize=maximize,
            max_grad_norm=max_grad_norm,
            on_nonfinite=on_nonfinite,
            seed=seed,
            global_step=global_step,
            engine=engine,
        )
        whole = {name: self._given[name] for name in ("maximize", "max_grad_norm", "on_nonfinite", "seed")}
        check_flag("global_step", global_step)
        super(Optimizer, self).__init__()
        self._entries: list[Entry] = checked_entries(entries, whole, check_overrides(overrides))
        self._rates: list[Rate] = [own.lr for _, own in self._entries]
        self._shown = [(pattern, own) for pattern, own in entries]
        self._choose(engine, self._entries[0][1].settings)
        self._global_step = global_step
        self._rates_checked: Any = None
        self._matched: set[tuple[int, int]] = set()
        self._used: set[int] = set()
        self._entries_reported = False

    def _parts(self) -> Sequence[tuple[Settings, Rate]]:
        return [(own.settings, rate) for (_, own), rate in zip(self._entries, self._rates, strict=True)]

    def _place_of(self, name: Name, weights: Arr) -> int:
        place = first_match(self._entries, str(name), weights)
        if place is None:
            check_all_matched([name])
            raise AssertionError
        return place

    # ---- options

    @property
    def entries(self) -> list[tuple[Pattern, RuleOptions]]:
        """The patterns with their options, and the learning rates as they are now."""
        return [(pattern, replace(own, lr=lr)) for (pattern, own), lr in zip(self._shown, self._rates, strict=True)]

    def _every_option(self) -> dict[str, Any]:
        """By the pattern of each entry."""
        return {repr(pattern): own.settings.options for pattern, own in self._entries}

    @property
    def rates(self) -> list[Any]:
        """The learning rate of each entry: numbers, functions of the step, or None for a rule's own."""
        return list(self._rates)

    @rates.setter
    def rates(self, values: Sequence[Rate]) -> None:
        if len(values) != len(self._entries):
            raise OptionError(f"{len(values)} learning rates for {len(self._entries)} entries: give one for each")
        parts = zip(values, self._entries, strict=True)
        self._rates = [checked_rate(value, own.settings) for value, (_, own) in parts]

    @property
    def lr(self) -> Any:
        """The learning rate of all entries; setting it sets it for all."""
        if any(rate is not self._rates[0] and rate != self._rates[0] for rate in self._rates):
            raise OptionError(f"entries have different learning rates, {self._rates}: read them from rates")
        return self._rates[0]

    @lr.setter
    def lr(self, value: Rate) -> None:
        self.rates = [value] * len(self._entries)

    def with_options(self, **options: Any) -> Mixture:
        """A copy, state included, with some arguments of the constructor changed, entries included."""
        changed, given = self.copy(), {**self._given, "entries": self.entries, **options}
        tracked, iteration = changed._tracked, changed.iteration
        Mixture.__init__(changed, **given)
        changed._tracked, changed.iteration = tracked, iteration
        for known in tracked.values():
            known.setting = known.unserved = None
        return changed

    def _chainable(self) -> tuple[str, ...]:
        return ("entries", *self._given)

    # ---- stepping

    def step(
        self, params: Mapping[str, Arr] | Sequence[Arr], grads: Mapping[str, Arr | None] | Sequence[Arr | None]
    ) -> None:
        """Step a whole model in place, given as two mappings by name or two sequences.

        Parameters without a gradient (None, or no entry in the mapping) are left alone.
        """
        new = [(name, weights) for name, weights, _ in pairs(params, grads) if name not in self._tracked]
        check_all_matched([name for name, p in new if first_match(self._entries, str(name), p) is None])
        super().step(params, grads)

    def _report_unused(self, complete: bool) -> None:
        super()._report_unused(complete)
        if complete and not self._entries_reported:
            self._entries_reported = True
            if idle := self._unused_entries(self._used):
                shown = ", ".join(map(repr, idle))
                message = f"entries of the mixture that match no parameter: {shown}"
                warnings.warn(message, UnusedOverrideWarning, stacklevel=4)

    def _unused_entries(self, used: Collection[int]) -> list[Any]:
        return [pattern for place, (pattern, _) in enumerate(self._entries) if place not in used]

    # ---- checkpoints

    def _told(self) -> tuple[Any, Any]:
        made_by = {name: known.made_by for name, known in self._tracked.items()}
        return made_by, [None if callable(rate) else rate for rate in self._rates]

    def _check_maker(self, state_dict: Any) -> Mapping[Name, type[Rule]]:
        rules = check_mixture(state_dict, [own.rule for _, own in self._entries], self._rule_by_name)
        return {name: rules[str(name)] for name in state_dict["state"]}

    def _rule_by_name(self, name: str) -> type[Rule] | None:
        """The rule of a parameter that has not been seen yet; None where a function of the parameter decides."""
        for pattern, own in self._entries:
            if callable(pattern):
                return None
            if pattern is not None and matches(pattern, name, None):
                return own.rule
        return None

    def _restore_rate(self, lr: Any) -> None:
        if isinstance(lr, Sequence) and len(lr) == len(self._rates):
            kept = [own if callable(own) or rate is None else rate for own, rate in zip(self._rates, lr, strict=True)]
            self.rates = kept

    def __repr__(self) -> str:
        entries = ", ".join(f"({pattern!r}, {own!r})" for pattern, own in self.entries)
        usual = dict(overrides=(), maximize=False, max_grad_norm=None, on_nonfinite="propagate", seed=0)
        usual |= dict(global_step=False, engine="auto")
        given = [f"{name}={readable(value)}" for name, value in self._given.items() if value != usual[name]]
        return f"Mixture({', '.join([f'[{entries}]', *given])})"
