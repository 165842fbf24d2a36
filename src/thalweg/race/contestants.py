"""Who races: rules, mixtures, and optimizers from elsewhere by import path, with the options that the user gives them.

Everyone gets the same treatment: a grid of learning rates around a typical one, no weight decay, and momentum of 0.9
where there would be none.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from thalweg.arrays import is_number
from thalweg.errors import CommandError
from thalweg.rules import RULES, AdamW, Rule
from thalweg.settings import defaults, option_names
from thalweg.show.arguments import Given, check_options, suggest
from thalweg.show.extras import need
from thalweg.show.modules import digest, digest_source, import_attribute

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

    #: A rule's or mixture's of the package, or an import path.
    name: str
    rule: type[Rule] | None = field(default=None, repr=False)
    make: Callable[..., Any] | None = field(default=None, repr=False)
    options: Mapping[str, Any] = field(default_factory=dict)
    #: The options that it has; None: any.
    known: Sequence[str] | None = None
    #: Learning rates to try.
    rates: Sequence[float] = ()
    #: Changes when the optimizer does, beside the version of thalweg.
    fingerprint: str = field(default="", repr=False)

    def __str__(self) -> str:
        written = ", ".join(f"{name}={value!r}" for name, value in sorted(self.options.items()))
        return f"{self.name}({written})"


def grid_of(rule: type[Rule]) -> list[float]:
    """Learning rates around a typical one."""
    middle = rule.typical_lr or rule.default_lr or ANY_RATE
    return [float(f"{middle * share:.2g}") for share in GRID]


def equal_terms(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The options that put everyone on equal terms, where they differ from the defaults."""
    decay, momentum = defaults.get("weight_decay"), defaults.get("momentum")
    options: dict[str, Any] = {"weight_decay": 0.0} if is_number(decay) and decay != 0 else {}
    return options | ({"momentum": 0.9} if is_number(momentum) and momentum == 0 else {})


# ---- by name, or by import path

#: Mixtures of thalweg.torch, both of whose rules have the rate that is tried: Muon's steps are scaled to AdamW's.
MIXTURES: Mapping[str, Mapping[str, Any]] = {
    "muon_adamw": {"weight_decay": 0.0, "muon": {"scaling": "match_rms_adamw"}},
    "kron_adamw": {"weight_decay": 0.0},
}
PACKAGED = (*RULES, *MIXTURES)


def default_contestants() -> list[str]:
    """Every rule, and muon_adamw where torch is installed, which it needs."""
    return [*RULES, *(["muon_adamw"] if importlib.util.find_spec("torch") else [])]


def enter_all(references: Sequence[Any]) -> list[Contestant]:
    """Everyone once, in this order."""
    return list({contestant.name: contestant for contestant in map(enter, references)}.values())


def enter(reference: Any) -> Contestant:
    """A contestant: a rule or mixture by name, ``module:MyRule``, ``module:function``, ``torch.optim.Adam``."""
    if isinstance(reference, Contestant):
        return reference
    if inspect.isclass(reference) and issubclass(reference, Rule):
        return enter_rule(reference)
    if not isinstance(reference, str):
        raise CommandError(f"{reference!r} is no optimizer: {WANTED}")
    name = {name.lower(): name for name in PACKAGED}.get(reference.strip().lower())
    if name is None and (":" in reference or "." in reference):
        return import_contestant(reference.strip())
    if name is None:
        others = "others go by import path, such as torch.optim.Adam"
        raise CommandError(f"there is no optimizer {reference!r} ({others}): {suggest(reference, PACKAGED)}")
    if name in RULES:
        return enter_rule(RULES[name])
    mixture = import_contestant(f"thalweg.torch:{name}")
    known = ("adamw_lr", "weight_decay", "max_grad_norm")
    return replace(mixture, name=name, options=MIXTURES[name], known=known, fingerprint="")


def enter_rule(rule: type[Rule]) -> Contestant:
    """A rule, with a fingerprint of its source if it is the user's."""
    is_packaged = RULES.get(rule.__name__) is rule
    return Contestant(
        name=rule.__name__ if is_packaged else f"{rule.__module__}.{rule.__qualname__}",
        rule=rule,
        options={**equal_terms(defaults(rule)), **(SETTINGS.get(rule.__name__, {}) if is_packaged else {})},
        known=(*option_names(rule), "variant"),
        rates=grid_of(rule),
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
    is_class = inspect.isclass(make)
    if is_class and issubclass(make, Rule):
        return enter_rule(make)
    if not callable(make):
        raise CommandError(f"{reference} is a {type(make).__name__}, and no optimizer: {WANTED}")
    parameters = list(inspect.signature(make).parameters.values())
    is_open = any(p.kind is p.VAR_KEYWORD for p in parameters)
    usual = {p.name: p.default for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    package = importlib.import_module(module.__name__.partition(".")[0])
    namesake = {name.lower(): rule for name, rule in RULES.items()}.get(attribute.lower(), AdamW)
    return Contestant(
        name=f"{module_name}.{attribute}",
        make=of_params(make) if is_class or next(iter(usual), "") == "params" else make,
        options=equal_terms(usual) if is_class else {},
        known=None if is_open else [name for name in list(usual)[1:] if name not in RATE_NAMES],
        rates=grid_of(namesake),
        fingerprint=digest(str(getattr(package, "__version__", "")).encode(), digest_source(module).encode()),
    )


def of_params(make: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a model from one of a list of parameters, which knows no engines."""
    return lambda model, engine="auto", **options: make(list(model.parameters()), **options)


# ---- options that the user asks for


def find_contestant(word: str, contestants: Sequence[Contestant]) -> Contestant:
    """The one of that name, however it is spelt."""
    names = {contestant.name.lower(): contestant for contestant in contestants}
    if (wanted := word.strip().lower().replace(":", ".")) not in names:
        raise CommandError(f"no optimizer {word!r} takes part: {suggest(word, [each.name for each in contestants])}")
    return names[wanted]


def give_options(contestants: Sequence[Contestant], asked: Mapping[str, Mapping[str, Any]]) -> list[Contestant]:
    """Everyone with the options that the user asks for. asked: by contestant; under "" those for all that have them.

    Whether a value can be, optimizers say when they are made.
    """
    known = {contestant.name: contestant.known or () for contestant in contestants}
    given: dict[str, dict[str, Any]] = {name: {} for name in known}
    for owner, options in sorted(asked.items()):  # those for all come first, and those for one win
        if not isinstance(options, Mapping):
            raise CommandError(f"options of {owner or 'all optimizers'} must be a dict, got {options!r}")
        if not options.keys().isdisjoint(RATE_NAMES):
            raise CommandError("the learning rate is not an option: say which rates to try, by rates= or --lr")
        if owner:
            given[find_contestant(owner, contestants).name] |= options
            continue
        check_options([Given("", name, value) for name, value in options.items()], known)
        for contestant in contestants:
            has = known[contestant.name]
            given[contestant.name] |= {name: value for name, value in options.items() if name in has}
    return [replace(each, options={**each.options, **given[each.name]}) for each in contestants]
