"""Who races: every rule, those of the package and one's own, and mixtures that are ready made."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from thalweg.rules import RULES
from thalweg.show.modules import source_digest
from thalweg.show.registered import OWN_MIXTURES, ByRule, named, rule_of


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
    def tuned_like(self) -> str:
        """Whose learning rates are tried."""
        return self.name

    def with_options(self, options: Mapping[str, Any]) -> Contestant:
        return replace(self, options={**self.options, **options})

    def asked(self, given: Mapping[str, Any]) -> Contestant:
        return replace(self, given=given)

    def __str__(self) -> str:
        return f"{self.rule}({written(self.options)})"


@dataclass(frozen=True, kw_only=True)
class Mixed(Contestant):
    """A mixture: a model's hidden matrices by a rule, all else by AdamW. Its ``rule`` is the function that makes it.

    Both have the learning rate that is tried, unless AdamW's is given. A function of the user's, ``module:function``,
    is called as ``function(model, lr=..., **options)`` and returns any optimizer of torch.
    """

    #: Options that somebody may ask for, and whether there are no others.
    known: Sequence[str] = ("adamw_lr", "weight_decay", "max_grad_norm")
    closed: bool = True

    @property
    def tuned_like(self) -> str:
        return "AdamW"


def written(options: Mapping[str, Any]) -> str:
    """Options as Python would write them."""
    return ", ".join(f"{name}={value!r}" for name, value in sorted(options.items()))


def made(name: str) -> Contestant:
    """A rule that has no row below, with its own defaults; one of the user's is another when its source changes."""
    fingerprint = "" if name in RULES else source_digest(inspect.getmodule(rule_of(name)))
    return Contestant(name=name, rule=name, fingerprint=fingerprint)


#: By name, those who race when they are asked for: only tasks in torch have a model that tells matrices apart.
MIXTURES: dict[str, Mixed] = {
    mixed.name: mixed
    for mixed in (
        Mixed(name="kron_adamw", rule="kron_adamw", options=dict(weight_decay=0.0)),
        # scaled so that a step is as long as AdamW's, since both have one rate
        Mixed(
            name="muon_adamw",
            rule="muon_adamw",
            options=dict(weight_decay=0.0, muon=dict(scaling="match_rms_adamw")),
        ),
    )
}

#: Everyone: with the options that follow, or with its own where a rule is not listed here.
CONTESTANTS: Mapping[str, Contestant] = ByRule(
    {
        contestant.name: contestant
        for contestant in (
            Contestant(name="SGD", rule="SGD", options=dict(momentum=0.9)),
            # users who want weight decay compared pass --option weight_decay=0.01
            Contestant(name="AdamW", rule="AdamW", options=dict(weight_decay=0.0)),
            Contestant(name="LARS", rule="LARS", options=dict(momentum=0.9)),
            Contestant(name="LAMB", rule="LAMB"),
            # layers of small models are factored too, which by default are too small to be worth it
            Contestant(name="Adafactor", rule="Adafactor", options=dict(min_dim_size_to_factor=0)),
            # biases go along as matrices of one row, and models are too small for bfloat16 to save time
            Contestant(name="Muon", rule="Muon", options=dict(vectors="row", ns_dtype=None)),
            Contestant(name="Kron", rule="Kron"),
        )
    },
    made,
    beside=MIXTURES,
)

#: Where a task does not know better: five rates, half a decade apart.
RATES: Mapping[str, Sequence[float]] = ByRule(
    {
        "SGD": (0.003, 0.01, 0.03, 0.1, 0.3),
        "AdamW": (0.001, 0.003, 0.01, 0.03, 0.1),
        "LARS": (0.3, 1.0, 3.0, 10.0, 30.0),
        "LAMB": (0.001, 0.003, 0.01, 0.03, 0.1),
        "Adafactor": (0.003, 0.01, 0.03, 0.1, 0.3),
        "Muon": (0.003, 0.01, 0.03, 0.1, 0.3),
        "Kron": (3e-4, 0.001, 0.003, 0.01, 0.03),
    },
    lambda rule: (3e-4, 0.001, 0.003, 0.01, 0.03),
)

#: For models of millions of parameters: five rates, a factor of 3 apart.
LARGE_RATES: Mapping[str, Sequence[float]] = {
    rule: tuple(float(f"{middle * 3.0**power:.2g}") for power in range(-2, 3))
    for rule, middle in {
        "SGD": 0.1,
        "AdamW": 0.002,
        "LARS": 3.0,
        "LAMB": 0.02,
        "Adafactor": 0.03,
        "Muon": 0.01,
        "Lion": 3e-4,
        "Kron": 1e-3,
    }.items()
}


def enter(reference: Any) -> Any:
    """The name under which an optimizer races: a rule or a mixture by name, ``module:MyRule``, ``module:function``."""
    name = named(reference)
    if name in OWN_MIXTURES:
        make = OWN_MIXTURES[name]
        parameters = inspect.signature(make).parameters.values()
        named_ones = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
        MIXTURES[name] = Mixed(
            name=name,
            rule=name,
            known=[option for option in named_ones[1:] if option not in ("lr", "engine")],
            closed=not any(p.kind is p.VAR_KEYWORD for p in parameters),
            fingerprint=source_digest(inspect.getmodule(make)),
        )
    return name
