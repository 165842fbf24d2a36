"""Who races: rules, mixtures, and optimizers from elsewhere by import path, with the options that the user gives them.

Everyone gets the same treatment: a grid of learning rates around a typical one, no weight decay, and momentum of 0.9
where there would be none.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from thalweg.arrays import is_number
from thalweg.errors import CommandError, OptionError, RuleError
from thalweg.given import check_known
from thalweg.rules import RULES, AdamW, Rule
from thalweg.settings import Settings, defaults, option_names
from thalweg.show.arguments import suggest
from thalweg.show.extras import need
from thalweg.show.modules import digest, digest_source, import_attribute
from thalweg.trial import check_rule

#: A grid of rates around a typical one: half a decade apart.
GRID = (0.1, 0.3, 1.0, 3.0, 10.0)
#: Where to begin with a rule that tells no rate at all.
ANY_RATE = 0.01
RATE_NAMES = ("lr", "learning_rate")
#: What a rule needs beside its defaults on models as small as those of a race.
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    # small layers are factored too, which by default are not worth it
    "Adafactor": {"min_dim_size_to_factor": 0},
    # biases go along as matrices of one row, and models are too small for bfloat16 to save time
    "Muon": {"vectors": "row", "ns_dtype": None},
}
WANTED = (
    "it must be a rule, a function (model, lr=...) or (params, lr=...) that returns an optimizer of torch, or a class "
    "derived from torch.optim.Optimizer"
)


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """An optimizer that takes part: a rule, or what ``make(model, lr=..., **options)`` returns, in torch."""

    name: str
    #: How it is written in front of its options: a rule's name, or an import path.
    path: str = ""
    rule: type[Rule] | None = field(default=None, repr=False)
    make: Callable[..., Any] | None = field(default=None, repr=False)
    #: What ``make`` gets: the model, or a list of its parameters.
    takes: Literal["model", "params"] = "model"
    options: Mapping[str, Any] = field(default_factory=dict)
    #: What the user asked for beside.
    given: Mapping[str, Any] = field(default_factory=dict)
    #: The options of what is no rule, and whether it takes no others.
    known: Sequence[str] = ()
    closed: bool = True
    #: Whether it comes from another library.
    is_foreign: bool = False
    typical_lr: float = ANY_RATE
    #: Learning rates to try, instead of a grid around the typical one.
    rates: Sequence[float] = ()
    #: Changes when the optimizer does, beside the version of thalweg.
    fingerprint: str = field(default="", repr=False)

    @property
    def option_names(self) -> Sequence[str]:
        return self.known if self.rule is None else (*option_names(self.rule), "variant")

    @property
    def all_options(self) -> dict[str, Any]:
        return {**self.options, **self.given}

    @property
    def grid(self) -> list[float]:
        return [float(lr) for lr in self.rates] or [float(f"{self.typical_lr * share:.2g}") for share in GRID]

    def __str__(self) -> str:
        return f"{self.path or self.name}({write_options(self.all_options)})"


def write_options(options: Mapping[str, Any]) -> str:
    """Options as Python would write them."""
    return ", ".join(f"{name}={value!r}" for name, value in sorted(options.items()))


def typical_lr(rule: type[Rule]) -> float:
    return rule.typical_lr or rule.default_lr or ANY_RATE


def equal_terms(usual: Mapping[str, Any]) -> dict[str, Any]:
    """The options that put everyone on equal terms, where they differ from the defaults."""
    decay, momentum = usual.get("weight_decay"), usual.get("momentum")
    options: dict[str, Any] = {"weight_decay": 0.0} if is_number(decay) and decay != 0 else {}
    return options | ({"momentum": 0.9} if is_number(momentum) and momentum == 0 else {})


# ---- by name, or by import path


def make_mixture(
    name: str, model: Any, *, lr: float, engine: str, adamw_lr: float | None = None, **options: Any
) -> Any:
    """A mixture of the package, both of whose rules have the rate that is tried, unless AdamW's is given."""
    make = getattr(importlib.import_module("thalweg.torch"), name)
    return make(model, lr, adamw_lr=lr if adamw_lr is None else adamw_lr, engine=engine, **options)


#: Muon is scaled so that a step is as long as AdamW's, since both have one rate.
MIXTURES = {
    name: Contestant(
        name=name,
        make=partial(make_mixture, name),
        options={"weight_decay": 0.0, **options},
        known=("adamw_lr", "weight_decay", "max_grad_norm"),
        typical_lr=typical_lr(AdamW),
    )
    for name, options in (("muon_adamw", {"muon": {"scaling": "match_rms_adamw"}}), ("kron_adamw", {}))
}
PACKAGED = (*RULES, *MIXTURES)


def default_contestants() -> list[str]:
    """Every rule, and muon_adamw where torch is installed, which it needs."""
    return [*RULES, *(["muon_adamw"] if importlib.util.find_spec("torch") else [])]


def enter_all(references: Sequence[Any]) -> list[Contestant]:
    """Everyone once, in this order; by the last part of an import path where nobody else is called so."""
    entered = {contestant.path or contestant.name: contestant for contestant in map(enter, references)}
    counts = Counter(contestant.name.lower() for contestant in entered.values())
    taken = {name.lower() for name in PACKAGED}
    return [
        replace(contestant, name=path)
        if path != contestant.name and (counts[contestant.name.lower()] > 1 or contestant.name.lower() in taken)
        else contestant
        for path, contestant in entered.items()
    ]


def enter(reference: Any) -> Contestant:
    """A contestant: a rule or mixture by name, ``module:MyRule``, ``module:function``, ``torch.optim.Adam``."""
    if isinstance(reference, Contestant):
        return reference
    if isinstance(reference, str):
        by_key = {name.lower(): name for name in PACKAGED}
        name = by_key.get(reference.strip().lower())
        if name is not None:
            return MIXTURES[name] if name in MIXTURES else enter_rule(RULES[name])
        if ":" not in reference and "." not in reference:
            raise CommandError(
                f"there is no optimizer {reference!r} (others go by import path, such as "
                f"torch.optim.Adam): {suggest(reference, PACKAGED)}"
            )
        return import_contestant(reference.strip())
    if inspect.isclass(reference) and issubclass(reference, Rule):
        return enter_rule(reference)
    raise CommandError(f"{reference!r} is no optimizer: {WANTED}")


def enter_rule(rule: type[Rule]) -> Contestant:
    """A rule, with a fingerprint of its source if it is the user's."""
    try:
        check_rule(rule)
    except RuleError as error:
        raise CommandError(f"{rule.__name__}: {error}") from None
    is_packaged = RULES.get(rule.__name__) is rule
    return Contestant(
        name=rule.__name__,
        path=rule.__name__ if is_packaged else f"{rule.__module__}.{rule.__qualname__}",
        rule=rule,
        options={**equal_terms(defaults(rule)), **(SETTINGS.get(rule.__name__, {}) if is_packaged else {})},
        typical_lr=typical_lr(rule),
        fingerprint="" if is_packaged else digest_source(inspect.getmodule(rule)),
    )


def import_contestant(reference: str) -> Contestant:
    """What ``module:name`` or ``module.name`` is, and how it is made."""
    module_name, _, attribute = reference.partition(":") if ":" in reference else reference.rpartition(".")
    if module_name.partition(".")[0] == "torch":
        need("torch", "torch")
    try:
        make, module = import_attribute(f"{module_name}:{attribute}", "optimizer", "torch.optim:Adam", callable)
    except CommandError as error:
        raise CommandError(f"{reference}: {error}") from error
    if inspect.isclass(make) and issubclass(make, Rule):
        return enter_rule(make)
    if not callable(make):
        raise CommandError(f"{reference} is a {type(make).__name__}, not an optimizer: {WANTED}")
    need("torch", "torch")
    torch: Any = importlib.import_module("torch")
    if inspect.isclass(make) and not issubclass(make, torch.optim.Optimizer):
        raise CommandError(f"{reference} is a class, but not an optimizer: {WANTED}")
    try:
        parameters = list(inspect.signature(make).parameters.values())
    except (ValueError, TypeError):  # written in C
        parameters = [inspect.Parameter("params", inspect.Parameter.VAR_KEYWORD)]
    closed = not any(p.kind is p.VAR_KEYWORD for p in parameters)
    usual = {p.name: p.default for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if closed and "lr" not in usual:
        raise CommandError(f"{reference} takes no lr: {WANTED}")
    of_params = inspect.isclass(make) or bool(parameters and parameters[0].name == "params")
    namesake = {name.lower(): rule for name, rule in RULES.items()}.get(attribute.lower(), AdamW)
    return Contestant(
        name=attribute,
        path=f"{module_name}.{attribute}",
        make=make,
        takes="params" if of_params else "model",
        options=equal_terms(usual) if inspect.isclass(make) else {},
        known=[
            name for name in (usual if of_params else list(usual)[1:]) if name not in (*RATE_NAMES, "params", "engine")
        ],
        closed=closed,
        is_foreign=inspect.isclass(make),
        typical_lr=typical_lr(namesake),
        fingerprint=digest(version_of(module).encode(), digest_source(module).encode()),
    )


def version_of(module: Any) -> str:
    package = importlib.import_module(module.__name__.partition(".")[0])
    return str(getattr(package, "__version__", ""))


# ---- options that the user asks for


def find_contestant(word: str, contestants: Sequence[Contestant]) -> Contestant:
    """The one of that name, however it is spelt, or of that import path."""
    for contestant in contestants:
        if word.strip().lower().replace(":", ".") in (contestant.name.lower(), contestant.path.lower()):
            return contestant
    names = [contestant.name for contestant in contestants]
    raise CommandError(f"no optimizer {word!r} takes part: {suggest(word, names)}")


def give_options(contestants: Sequence[Contestant], asked: Mapping[str, Mapping[str, Any]]) -> list[Contestant]:
    """Everyone with the options that the user asks for. asked: by contestant; under "" those for all that have them."""
    own: dict[str, dict[str, Any]] = {contestant.name: {} for contestant in contestants}
    for owner, options in asked.items():
        if not isinstance(options, Mapping):
            raise CommandError(f"options of {owner or 'all optimizers'} must be a dict, got {options!r}")
        if any(name in RATE_NAMES for name in options):
            raise CommandError("the learning rate is not an option: say which rates to try, by rates= or --lr")
        if owner:
            own[find_contestant(owner, contestants).name].update(options)
    everywhere = dict(asked.get("", {}))
    entrants = []
    for contestant in contestants:
        for_all = {name: value for name, value in everywhere.items() if concerns(contestant, name, value)}
        entrants.append(replace(contestant, given=validate_options(contestant, for_all, own[contestant.name])))
    for name, value in everywhere.items():
        if not any(name in entrant.given for entrant in entrants):
            refuse_for_all(contestants, name, value)
    return entrants


def concerns(contestant: Contestant, name: str, value: Any) -> bool:
    """Whether an option for all is for this one."""
    if contestant.rule is not None and name == "variant":
        return value in contestant.rule.VARIANTS
    return name in contestant.option_names and not differs_in_count(contestant, name, value)


def differs_in_count(contestant: Contestant, name: str, value: Any) -> bool:
    """Whether an option is of several numbers here, and not of as many: betas are two, or three."""
    usual = None if contestant.rule is None else defaults(contestant.rule).get(name)
    if not isinstance(usual, tuple) or not isinstance(value, tuple):
        return False
    return len(usual) != len(value) and all(map(is_number, (*usual, *value)))


def refuse_for_all(contestants: Sequence[Contestant], name: str, value: Any) -> None:
    """Say why an option that is for all has reached nobody."""
    names = sorted({known for contestant in contestants for known in contestant.option_names})
    if name not in names:
        raise CommandError(f"no optimizer here has an option {name!r}: {suggest(name, names)}")
    for contestant in contestants:
        if differs_in_count(contestant, name, value):
            validate_options(contestant, {}, {name: value})  # which says how many it takes
    raise CommandError(f"the option {name}={value!r} has no effect on any optimizer here")


def validate_options(contestant: Contestant, for_all: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The options of one: an option of its own must have an effect, one for all is left out where it has none."""
    given = {**for_all, **own}
    try:
        if contestant.rule is None:
            if contestant.closed:
                check_known(contestant.name, given, contestant.known)
            return given
        check_known(contestant.rule, given, contestant.option_names)
        idle = make_settings(contestant.rule, {**contestant.options, **given}).base.rule.idle(1.0)
        given = {name: value for name, value in given.items() if name in own or name not in idle}
        settings = make_settings(contestant.rule, {**contestant.options, **given})
        settings.validate_lr(1.0, unasked=contestant.options.keys() - given.keys())
    except OptionError as error:
        words = str(error)
        raise CommandError(words if words.startswith(contestant.name) else f"{contestant.name}: {words}") from None
    return given


def make_settings(rule: type[Rule], options: dict[str, Any]) -> Settings:
    variant = options.pop("variant", None)
    return Settings(rule, options, variant)
