"""Who races: every rule of ours beside the two everyone knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from thalweg.show.registered import ByRule


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """An optimizer: one of our rules with some options."""

    name: str
    rule: str
    options: Mapping[str, Any] = field(default_factory=dict)
    #: What somebody asked for, which wins over what a task asks for.
    given: Mapping[str, Any] = field(default_factory=dict)

    #: Changes when the optimizer does, beside the version of thalweg.
    fingerprint: str = field(default="", repr=False)

    @property
    def fixed(self) -> Mapping[str, Any]:
        """What makes a rule one of the two that everyone knows, and cannot be otherwise."""
        return {name: value for name, value in self.options.items() if name == "trust"}

    @property
    def tuned_like(self) -> str:
        """Whose learning rates are tried."""
        return self.name

    def with_options(self, options: Mapping[str, Any]) -> Contestant:
        return replace(self, options={**self.options, **options})

    def asked(self, given: Mapping[str, Any]) -> Contestant:
        return replace(self, given=given)

    def __str__(self) -> str:
        return f"{self.rule}({written(self.options)})"


def written(options: Mapping[str, Any]) -> str:
    """Options as Python would write them."""
    return ", ".join(f"{name}={value!r}" for name, value in sorted(options.items()))


#: Everyone: with the options that follow, or with its own where a rule is not listed here.
CONTESTANTS: Mapping[str, Contestant] = ByRule(
    {
        contestant.name: contestant
        for contestant in (
            # with the trust ratio off, LARS is SGD with momentum and LAMB is AdamW
            Contestant(name="SGD", rule="LARS", options=dict(momentum=0.9, trust=False)),
            Contestant(name="AdamW", rule="LAMB", options=dict(trust=False)),
            Contestant(name="LARS", rule="LARS", options=dict(momentum=0.9)),
            Contestant(name="LAMB", rule="LAMB"),
            # layers of small models are factored too, which by default are too small to be worth it
            Contestant(name="Adafactor", rule="Adafactor", options=dict(min_dim_size_to_factor=0)),
            Contestant(name="Kron", rule="Kron"),
        )
    },
    lambda rule: Contestant(name=rule, rule=rule),
)

#: Where a task does not know better: five rates, half a decade apart.
RATES: Mapping[str, Sequence[float]] = ByRule(
    {
        "SGD": (0.003, 0.01, 0.03, 0.1, 0.3),
        "AdamW": (0.001, 0.003, 0.01, 0.03, 0.1),
        "LARS": (0.3, 1.0, 3.0, 10.0, 30.0),
        "LAMB": (0.001, 0.003, 0.01, 0.03, 0.1),
        "Adafactor": (0.003, 0.01, 0.03, 0.1, 0.3),
        "Kron": (3e-4, 0.001, 0.003, 0.01, 0.03),
    },
    lambda rule: (3e-4, 0.001, 0.003, 0.01, 0.03),
)
