"""One optimizer for raw arrays that steps by several rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from thalweg.exchange import check_exchanged
from thalweg.given import Overrides, Pattern, check_known, check_overrides, matches
from thalweg.numpy.arrays import Name
from thalweg.numpy.base import Optimizer, readable
from thalweg.numpy.checks import Rate
from thalweg.numpy.stepping import Engine
from thalweg.rules import Rule, Spikes
from thalweg.settings import WHOLE_STEP, RuleOptions, checked_entries

Entries: TypeAlias = Sequence[tuple[Pattern, RuleOptions]]
#: The arguments beside entries, with their defaults.
USUAL: dict[str, Any] = {
    **dict(
        overrides=(),
        maximize=False,
        max_grad_norm=None,
        on_nonfinite="propagate",
        seed=0,
        spikes=False,
        accumulate=None,
    ),
    **dict(global_step=False, engine="auto"),
}


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
        spikes: bool | Spikes = False,
        accumulate: int | None = None,
        global_step: bool = False,
        engine: Engine = "auto",
    ) -> None:
        super(Optimizer, self).__init__()
        self._configure(
            entries,
            overrides=overrides,
            maximize=maximize,
            max_grad_norm=max_grad_norm,
            on_nonfinite=on_nonfinite,
            seed=seed,
            spikes=spikes,
            accumulate=accumulate,
            global_step=global_step,
            engine=engine,
        )

    def _configure(self, entries: Entries, **given: Any) -> None:  # type: ignore[override]
        check_known("Mixture", given, ("entries", *USUAL))
        whole = {name: given[name] for name in WHOLE_STEP}
        checked = checked_entries(entries, whole, check_overrides(given["overrides"]))
        self._begin(checked, given["global_step"], given["engine"])
        self._given, self._shown = given, [(pattern, own) for pattern, own in entries]

    def _arguments(self) -> dict[str, Any]:
        return {"entries": self.entries, **self._given}

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
        self._set_rates(values)

    def _chainable(self) -> tuple[str, ...]:
        return ("entries", *USUAL)

    # ---- checkpoints

    def _told(self) -> tuple[Any, Any]:
        made_by = {name: known.made_by for name, known in self._tracked.items()}
        return made_by, [None if callable(rate) else rate for rate in self._rates]

    def _check_maker(self, state_dict: Any) -> Mapping[Name, type[Rule]]:
        rules = check_exchanged(state_dict, [own.rule for _, own in self._entries], self._rule_by_name)
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
        given = [f"{name}={readable(value)}" for name, value in self._given.items() if value != USUAL[name]]
        return f"Mixture({', '.join([f'[{entries}]', *given])})"
