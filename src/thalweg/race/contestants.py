"""Who races: rules, mixtures and optimizers of other libraries, with the options that the user gives them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from thalweg.arrays import is_number
from thalweg.errors import CommandError, OptionError
from thalweg.given import check_known
from thalweg.rules import RULES
from thalweg.settings import Settings, defaults, option_names
from thalweg.show.arguments import Given, check_options, check_word, suggest
from thalweg.show.modules import digest_source
from thalweg.show.registered import MIXTURES as PACKAGED_MIXTURES
from thalweg.show.registered import OWN, OWN_MIXTURES, RATE_NAMES, ByRule, name_rule, rule_of


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """An optimizer that takes part.

    A mixture steps a model's hidden matrices by a rule and all else by AdamW. Any function that is called as
    ``function(model, lr=..., **options)`` and returns an optimizer of torch is one.
    """

    name: str
    #: The rule, the function that makes a mixture, or what an optimizer of another library is imported by.
    rule: str
    kind: Literal["rule", "mixture", "torch", "optax"] = "rule"
    options: Mapping[str, Any] = field(default_factory=dict)
    #: What the user asked for, which wins over what a task asks for.
    given: Mapping[str, Any] = field(default_factory=dict)
    #: Makes the optimizer, unless thalweg has it.
    make: Callable[..., Any] | None = field(default=None, repr=False)
    #: Options of what is not a rule, and whether it takes no others.
    known: Sequence[str] = ()
    closed: bool = True
    #: Learning rates to try, instead of the task's for it or for the thalweg optimizer that it is like.
    rates: Sequence[float] = ()
    like: str = ""
    #: Changes when the optimizer does, beside the version of thalweg.
    fingerprint: str = field(default="", repr=False)

    @property
    def is_rival(self) -> bool:
        """Whether it comes from another library."""
        return self.kind in ("torch", "optax")

    @property
    def option_names(self) -> Sequence[str]:
        return (*option_names(rule_of(self.rule)), "variant") if self.kind == "rule" else self.known

    def with_options(self, options: Mapping[str, Any]) -> Contestant:
        return replace(self, options={**self.options, **options})

    def __str__(self) -> str:
        return f"{self.rule}({write_options(self.options)})"


def write_options(options: Mapping[str, Any]) -> str:
    """Options as Python would write them."""
    return ", ".join(f"{name}={value!r}" for name, value in sorted(options.items()))


def enter_rule(name: str) -> Contestant:
    """A rule with its own defaults; one of the user's is another when its source changes."""
    fingerprint = "" if name in RULES else digest_source(inspect.getmodule(rule_of(name)))
    return Contestant(name=name, rule=name, fingerprint=fingerprint)


#: By name, those who race when they are asked for: only tasks in torch have a model that tells matrices apart. Both
#: parts of a mixture have the learning rate that is tried, unless AdamW's is given.
MIXTURES: dict[str, Contestant] = {
    name: Contestant(
        name=name,
        rule=name,
        kind="mixture",
        options=dict(weight_decay=0.0, **options),
        known=("adamw_lr", "weight_decay", "max_grad_norm"),
        like="AdamW",
    )
    # Muon is scaled so that a step is as long as AdamW's, since both have one rate
    for name, options in (("kron_adamw", {}), ("muon_adamw", dict(muon=dict(scaling="match_rms_adamw"))))
}

OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": dict(momentum=0.9),
    # users who want weight decay compared pass --option weight_decay=0.01
    "AdamW": dict(weight_decay=0.0),
    "LARS": dict(momentum=0.9),
    "LAMB": {},
    # layers of small models are factored too, which by default are too small to be worth it
    "Adafactor": dict(min_dim_size_to_factor=0),
    # biases go along as matrices of one row, and models are too small for bfloat16 to save time
    "Muon": dict(vectors="row", ns_dtype=None),
    "Kron": {},
    "SOAP": dict(weight_decay=0.0),
}
#: Everyone: with these options, or with its own where a rule has none here.
CONTESTANTS: Mapping[str, Contestant] = ByRule(
    {name: Contestant(name=name, rule=name, options=options) for name, options in OPTIONS.items()},
    enter_rule,
    beside=MIXTURES,
)

#: Where a task does not know better: five rates, half a decade apart.
RATES: Mapping[str, Sequence[float]] = ByRule(
    {
        **dict.fromkeys(("SGD", "Adafactor", "Muon"), (0.003, 0.01, 0.03, 0.1, 0.3)),
        **dict.fromkeys(("AdamW", "AdEMAMix", "MARS", "LAMB", "SOAP"), (0.001, 0.003, 0.01, 0.03, 0.1)),
        "LARS": (0.3, 1.0, 3.0, 10.0, 30.0),
    },
    lambda rule: (3e-4, 0.001, 0.003, 0.01, 0.03),
)

#: For models of millions of parameters: five rates, a factor of 3 apart.
LARGE_RATES: Mapping[str, Sequence[float]] = {
    rule: tuple(float(f"{middle * 3.0**power:.2g}") for power in range(-2, 3))
    for rule, middle in {
        **{"SGD": 0.1, "AdamW": 0.002, "AdEMAMix": 0.002, "MARS": 0.006, "LARS": 3.0, "LAMB": 0.02},
        **{"Adafactor": 0.03, "Muon": 0.01, "Lion": 3e-4, "Kron": 1e-3, "SOAP": 0.003},
    }.items()
}

#: What a word after "+" stands for, in runs as short as a race.
AROUND: Mapping[str, Mapping[str, Any]] = {
    "cautious": {"cautious": True},
    "averaged": {"averaged": 0.999, "averaged_warmup": True},
    "schedule_free": {"schedule_free": True},
    "spikes": {"spikes": True},
}


def enter_around(reference: str) -> str:
    """The name under which a rule races with something around it, given as ``adamw+cautious+averaged``."""
    first, *words = (word.strip() for word in reference.split("+"))
    known = {name.lower(): name for name in (*RULES, *OWN)}
    rule = known.get(str(name_rule(first)).lower())
    if rule is None:
        raise CommandError(f"{reference}: there is no rule {first!r}: {suggest(first, list(known.values()))}")
    options = dict(CONTESTANTS[rule].options)
    for word in words:
        if word not in AROUND:
            raise CommandError(f"{reference}: {word!r} does not go around a rule: {suggest(word, list(AROUND))}")
        options |= AROUND[word]
    if "schedule_free" in words:  # which takes the place of momentum
        default: Any = rule_of(rule)()
        options |= {"betas": (0.0, *default.betas[1:])} if hasattr(default, "betas") else {}
        options |= {"momentum": 0.0} if hasattr(default, "momentum") else {}
    name = "+".join([rule, *words])
    MIXTURES[name] = replace(CONTESTANTS[rule], name=name, options=options, like=rule)
    return name


def enter(reference: Any) -> Any:
    """The name under which an optimizer races: a rule or a mixture by name, ``module:MyRule``, ``module:function``.

    Names of what goes around a rule may follow it, each after a "+".
    """
    if isinstance(reference, str) and "+" in reference:
        return enter_around(reference)
    name = name_rule(reference)
    if name in OWN_MIXTURES:
        make = OWN_MIXTURES[name]
        parameters = inspect.signature(make).parameters.values()
        named_ones = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
        MIXTURES[name] = Contestant(
            name=name,
            rule=name,
            kind="mixture",
            make=make,
            known=[option for option in named_ones[1:] if option not in ("lr", "engine")],
            closed=not any(p.kind is p.VAR_KEYWORD for p in parameters),
            like="AdamW",
            fingerprint=digest_source(inspect.getmodule(make)),
        )
    return name


def is_packaged(contestant: Contestant) -> bool:
    """Whether every installation of thalweg has it."""
    return contestant.name in RULES or contestant.name in PACKAGED_MIXTURES


# ---- options that the user asks for


def split_rates(
    asked: Mapping[str, Mapping[str, Any]], rates: Mapping[str, Sequence[float]]
) -> tuple[dict[str, dict[str, Any]], dict[str, Sequence[float]]]:
    """The options without learning rates, which are tried one after another; and the rates with them.

    asked, rates: by contestant; under "" those for all that have them.
    """
    options: dict[str, dict[str, Any]] = {}
    all_rates = dict(rates)
    for owner, given in asked.items():
        if not isinstance(given, Mapping):
            raise CommandError(f"options of {owner or 'all optimizers'} must be a dict, got {given!r}")
        options[owner] = {name: value for name, value in given.items() if name not in RATE_NAMES}
        for name in given.keys() & RATE_NAMES:
            if owner in all_rates:
                raise CommandError(
                    f"the learning rate of {owner or 'all optimizers'} is given twice, as a rate and as an option"
                )
            all_rates[owner] = given[name] if isinstance(given[name], (list, tuple)) else [given[name]]
    return options, all_rates


def give_options(contestants: Sequence[Contestant], asked: Mapping[str, Mapping[str, Any]]) -> list[Contestant]:
    """Everyone with the options that the user asks for, validated by their rules. asked: as for ``split_rates``."""
    options = [Given(owner, *pair) for owner, own in asked.items() for pair in own.items()]
    check_owners([option for option in options if option.owner], contestants)
    check_options(options, {contestant.name: contestant.option_names for contestant in contestants})
    everywhere = asked.get("", {})
    entrants = []
    for contestant in contestants:
        for_all = {name: value for name, value in everywhere.items() if has(contestant, name, value)}
        given = validate_options(contestant, for_all, asked.get(contestant.name, {}))
        entrants.append(replace(contestant, given=given))
    for name, value in everywhere.items():
        if any(name in each.given or name in asked.get(each.name, {}) for each in entrants):
            continue
        for contestant in contestants:
            if differs_in_count(contestant, name, value):
                validate_options(contestant, {name: value}, {})  # which says how many it takes
        raise CommandError(f"the option {name}={value!r} has no effect on any optimizer here")
    return entrants


def check_owners(options: Sequence[Given], contestants: Sequence[Contestant]) -> None:
    """Refuse options and rates that are for an optimizer which does not race."""
    names = [contestant.name for contestant in contestants]
    for option in options:
        if option.owner not in CONTESTANTS:
            check_word("optimizer", option.owner, names)
    check_options(options, dict.fromkeys(names, ()))


def has(contestant: Contestant, name: str, value: Any) -> bool:
    """Whether an option for all concerns this one."""
    if contestant.kind == "rule" and name == "variant":
        return value in rule_of(contestant.rule).VARIANTS
    return name in contestant.option_names and not differs_in_count(contestant, name, value)


def differs_in_count(contestant: Contestant, name: str, value: Any) -> bool:
    """Whether an option is of several numbers here, and not of as many: betas are two, or three."""
    own = defaults(rule_of(contestant.rule)).get(name) if contestant.kind == "rule" else None
    if not isinstance(own, tuple) or not isinstance(value, tuple):
        return False
    return len(own) != len(value) and all(map(is_number, (*own, *value)))


def validate_options(contestant: Contestant, for_all: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The options of one: an option of its own must have an effect, one for all is left out where it has none."""
    given = {**for_all, **own}
    try:
        if contestant.kind != "rule":
            if contestant.closed:
                check_known(contestant.name, given, contestant.known)
            return given
        check_known(rule_of(contestant.rule), given, contestant.option_names)
        idle = make_settings(contestant, given).base.rule.idle(1.0)
        given = {name: value for name, value in given.items() if name in own or name not in idle}
        make_settings(contestant, given).validate_lr(1.0, unasked=contestant.options.keys() - given.keys())
    except OptionError as error:
        message = str(error)
        raise CommandError(
            message if message.startswith(contestant.name) else f"{contestant.name}: {message}"
        ) from None
    return given


def make_settings(contestant: Contestant, given: Mapping[str, Any]) -> Settings:
    options = {**contestant.options, **given}
    variant = options.pop("variant", None)
    return Settings(rule_of(contestant.rule), options, variant)
