"""Who races: rules, mixtures, and optimizers from elsewhere by import path, with the options that the user gives them.

Everyone gets the same treatment: a grid of learning rates around a typical one, no weight decay, and momentum of 0.9
where there would be none.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from thalweg.arrays import is_number
from thalweg.errors import CommandError
from thalweg.rules import RULES, AdamW, Rule
from thalweg.settings import WHOLE_STEP, around_options, defaults
from thalweg.show.arguments import Given, check_options, suggest
from thalweg.show.extras import need
from thalweg.show.modules import digest, digest_source, import_attribute

#: A grid of rates around a typical one: half a decade apart.
GRID = (0.1, 0.3, 1.0, 3.0, 10.0)
#: Where to begin with a rule that tells no rate at all.
ANY_RATE = 0.01
#: Mixtures of both of whose rules have the rate that is tried.
MIXTURES = ("muon_adamw", "kron_adamw")
#: What has a name of its own in the race, and where it is; everything else goes by its import path.
PATHS = {name: f"{rule.__module__}:{name}" for name, rule in RULES.items()}
PATHS |= {name: f"thalweg.torch:{name}" for name in MIXTURES}
#: What these need beside equal terms.
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    # on models as small as those of a race, small layers are factored too, which by default are not worth it
    "Adafactor": {"min_dim_size_to_factor": 0},
    # biases go along as matrices of one row, and models are too small for bfloat16 to save time
    "Muon": {"vectors": "row", "ns_dtype": None},
    # so that Muon's steps are scaled to AdamW's
    "muon_adamw": {"weight_decay": 0.0, "muon": {"scaling": "match_rms_adamw"}},
    "kron_adamw": {"weight_decay": 0.0},
}
WANTED = (
    "it must be a rule, or the import path of a rule, of a function (model, lr=...) or (params, lr=...) that returns "
    "an optimizer of torch, or of a class derived from torch.optim.Optimizer"
)


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """An optimizer that takes part: what ``make(model, lr=..., **options)`` returns, in torch."""

    #: A rule's or mixture's of the package, or an import path.
    name: str
    make: Callable[..., Any] = field(repr=False)
    #: A rule steps arrays without torch.
    rule: type[Rule] | None = field(default=None, repr=False)
    options: Mapping[str, Any] = field(default_factory=dict)
    #: The options that it gets of those that are for all.
    known: Sequence[str] = ()
    #: Learning rates to try first; whether others may be tried beside them.
    rates: Sequence[float] = ()
    is_searched: bool = True
    #: Changes when the optimizer does, beside the version of thalweg.
    fingerprint: str = field(default="", repr=False)

    def __str__(self) -> str:
        written = ", ".join(f"{name}={value!r}" for name, value in sorted(self.options.items()))
        return f"{self.name}({written})"


def enter_all(
    references: Sequence[Any] | None, against: Sequence[Any], options: Mapping[str, Mapping[str, Any]]
) -> list[Contestant]:
    """Everyone once, in this order, with the options that the user asks for; by default all rules, and muon_adamw."""
    if references is None:
        references = [*RULES, *(["muon_adamw"] if importlib.util.find_spec("torch") else [])]
    contestants = {contestant.name: contestant for contestant in map(enter, [*references, *against])}
    return give_options(list(contestants.values()), options)


def enter(reference: Any) -> Contestant:
    """A contestant: a rule or mixture by name, ``module:MyRule``, ``module:function``, ``torch.optim.Adam``."""
    if isinstance(reference, Contestant):
        return reference
    value, module, path = reference, None, ""
    if isinstance(reference, str):
        value, module, path = import_optimizer(reference.strip())
    rule = value if inspect.isclass(value) and issubclass(value, Rule) else None
    if rule is not None:
        is_packaged = RULES.get(rule.__name__) is rule
        name = rule.__name__ if is_packaged else f"{rule.__module__}.{rule.__qualname__}"
        known = {**defaults(rule), "variant": None, "engine": "auto"}
    elif path and callable(value):
        name = {path: name for name, path in PATHS.items()}.get(path, path.replace(":", "."))
        parameters = inspect.signature(value).parameters
        takes_params = inspect.isclass(value) or next(iter(parameters), "") == "params"
        named = [p for p in list(parameters.values())[1:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        known = {p.name: p.default for p in named}
        if name in MIXTURES:
            known |= dict.fromkeys((*around_options(), *WHOLE_STEP, "engine"))
    else:
        raise CommandError(f"{reference!r} is no optimizer: {WANTED}")

    def make(model: Any, **options: Any) -> Any:
        if rule is not None:
            return importlib.import_module("thalweg.torch").optimizer(rule)(list(model.named_parameters()), **options)
        return value(list(model.parameters()) if takes_params else model, **options)

    namesakes = {rule_name.lower(): namesake for rule_name, namesake in RULES.items()}
    rated = rule or namesakes.get(name.rpartition(".")[2].lower(), AdamW)
    typical = rated.typical_lr or rated.default_lr or ANY_RATE
    return Contestant(
        name=name,
        make=make,
        rule=rule,
        options={**(equalize(known) if inspect.isclass(value) else {}), **SETTINGS.get(name, {})},
        known=list(known),
        rates=[float(f"{typical * share:.2g}") for share in GRID],
        fingerprint=fingerprint_of(value, module),
    )


def import_optimizer(reference: str) -> tuple[Any, Any, str]:
    """What a name or an import path means, the module that has it, and its path as ``module:name``."""
    path = {name.lower(): path for name, path in PATHS.items()}.get(reference.lower(), reference)
    module_name, _, attribute = path.rpartition(":" if ":" in path else ".")
    if not module_name:
        others = "others go by import path, such as torch.optim.Adam"
        raise CommandError(f"there is no optimizer {reference!r} ({others}): {suggest(reference, PATHS)}")
    if "torch" in module_name.split("."):
        need("torch", "torch")
    path = f"{module_name}:{attribute}"
    try:
        value, module = import_attribute(path, "optimizer", "torch.optim:Adam", callable)
    except CommandError as error:
        raise CommandError(f"{reference}: {error}") from error
    return value, module, path


def equalize(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The options that put everyone on equal terms, where they differ from the defaults."""
    decay, momentum = defaults.get("weight_decay"), defaults.get("momentum")
    options: dict[str, Any] = {"weight_decay": 0.0} if is_number(decay) and decay != 0 else {}
    return options | ({"momentum": 0.9} if is_number(momentum) and momentum == 0 else {})


def fingerprint_of(value: Any, module: Any) -> str:
    """A text that changes with the source of a class or a function, and with the version of its package."""
    if inspect.isclass(value) or inspect.isfunction(value):
        module = inspect.getmodule(value)
    package = importlib.import_module(module.__name__.partition(".")[0])
    return digest(str(getattr(package, "__version__", "")).encode(), digest_source(module).encode())


# ---- options that the user asks for


def give_options(contestants: Sequence[Contestant], asked: Mapping[str, Mapping[str, Any]]) -> list[Contestant]:
    """Everyone with the options that the user asks for. asked: by contestant; under "" those for all that have them.

    Whether a value can be, optimizers say when they are made; ``lr`` is the rate to try, or several.
    """
    names = {contestant.name.lower(): contestant.name for contestant in contestants}
    accepted = {contestant.name: {*contestant.known, "lr"} for contestant in contestants}
    given: dict[str, dict[str, Any]] = {name: {} for name in names.values()}
    for owner, options in sorted(asked.items()):  # those for all come first, and those for one win
        name = names.get(owner.strip().lower().replace(":", "."))
        if owner and name is None:
            raise CommandError(f"no optimizer {owner!r} takes part: {suggest(owner, given)}")
        if not isinstance(options, Mapping):
            raise CommandError(f"options of {owner or 'all optimizers'} must be a dict, got {options!r}")
        if name is not None:
            given[name] |= options
            continue
        check_options([Given("", option, value) for option, value in options.items()], accepted)
        for name in names.values():
            given[name] |= {key: value for key, value in options.items() if key in accepted[name]}
    return [with_options(contestant, given[contestant.name]) for contestant in contestants]


def with_options(contestant: Contestant, given: Mapping[str, Any]) -> Contestant:
    """The contestant with these options, of which ``lr`` takes the place of its grid."""
    options = {**contestant.options, **given}
    if "lr" not in options:
        return replace(contestant, options=options)
    asked = options.pop("lr")
    rates = list(asked) if isinstance(asked, (list, tuple)) else [asked]
    if not rates or not all(is_number(lr) and 0 < lr < math.inf for lr in rates):
        raise CommandError(f"{contestant.name}: lr must be a positive number, or several, got {asked!r}")
    return replace(contestant, options=options, rates=sorted(map(float, rates)), is_searched=False)
