"""The optimizers that are planned: the real ones, of a module that takes no memory."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from thalweg.errors import CommandError, OptimError, ParameterError, RuleError
from thalweg.rules import RULES, Rule
from thalweg.settings import WHOLE_STEP, Settings, find_idle, option_names
from thalweg.show.arguments import Given, check_options, suggest
from thalweg.show.modules import describe_error, import_attribute
from thalweg.trial import check_rule

if TYPE_CHECKING:
    from torch import nn

    from thalweg.torch import Optimizer

#: Options of rules that are usual and not their defaults.
USUAL: Mapping[str, Mapping[str, Any]] = {"SGD": {"momentum": 0.9}}
#: Mixtures of ``thalweg.torch``: the rules whose options they take, each under its name in small letters.
MIXTURES: Mapping[str, tuple[str, ...]] = {"muon_adamw": ("Muon", "AdamW"), "kron_adamw": ("Kron", "AdamW")}
PACKAGED = (*RULES, *MIXTURES)


def find_optimizer(reference: Any) -> Any:
    """A rule, or a function that makes a mixture: by name, as ``module:attribute``, or a rule itself.

    >>> find_optimizer("lamb"), find_optimizer("muon_adamw").__name__
    (<class 'thalweg.rules.lamb.LAMB'>, 'muon_adamw')
    """
    made = reference
    if isinstance(reference, str) and ":" in reference:
        made, _ = import_attribute(reference.strip(), "rule", "mymodule:MyRule", is_rule)
    elif isinstance(reference, str):
        name = {name.lower(): name for name in PACKAGED}.get(reference.strip().lower())
        if name is None:
            raise CommandError(f"there is no optimizer {reference!r}: {suggest(reference, PACKAGED)}")
        made = RULES[name] if name in RULES else getattr(importlib.import_module("thalweg.torch"), name)
    if not inspect.isfunction(made):
        try:
            check_rule(made)
        except RuleError as error:
            raise CommandError(f"{reference}: {error}") from None
    return made


def is_rule(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Rule)


def name_optimizers(references: Iterable[Any]) -> dict[str, Any]:
    """Optimizers by their names: those of the user's as ``module:name`` where another one is called so."""
    named: dict[str, Any] = {}
    for made in map(find_optimizer, references):
        name = made.__name__
        is_packaged = name in PACKAGED and find_optimizer(name) is made
        is_taken = name.lower() in map(str.lower, PACKAGED) or named.get(name, made) is not made
        named[spell_path(made) if is_taken and not is_packaged else name] = made
    return named


def spell_path(made: Any) -> str:
    return f"{made.__module__}:{made.__qualname__}"


def resolve_options(options: Iterable[Given], named: Mapping[str, Any]) -> list[Given]:
    """Options with their optimizers as these are called here; those that nobody here has are refused."""
    owners = {word.lower(): name for name, made in named.items() for word in (name, spell_path(made))}
    given = [option._replace(owner=owners.get(option.owner.lower(), option.owner)) for option in options]
    for option in given:
        if option.name in ("lr", "learning_rate"):
            raise CommandError(f"no figure depends on the learning rate: leave out --option {option.spelt}")
    check_options(given, {name: list_options(name, made) for name, made in named.items()})
    return given


def list_options(name: str, made: Any) -> list[str]:
    """The options that an optimizer takes: those of its rule, or of the rules of a mixture."""
    if is_rule(made):
        return [*option_names(made), "variant"]
    return [option for rule in MIXTURES.get(name, ()) for option in option_names(RULES[rule])]


def build_optimizer(name: str, made: Any, module: nn.Module, given: Sequence[Given]) -> Optimizer:
    """The optimizer itself; ParameterError says what it does not take of the module."""
    ours = [o for o in given if o.owner == name or (not o.owner and o.name in list_options(name, made))]
    return build_of_rule(name, made, module, ours) if is_rule(made) else build_mixture(name, made, module, ours)


def build_of_rule(name: str, rule: type[Rule], module: nn.Module, given: Sequence[Given]) -> Optimizer:
    """An optimizer of one rule; an option that is for all of them may have no effect on it."""
    rate = 1e-3 if rule.default_lr is None and not rule.lr_optional else rule.default_lr
    options = {**USUAL.get(name, {}), **{option.name: option.value for option in given}}
    variant = options.pop("variant", None)
    idle = find_idle(Settings(rule, options, variant).base.rule, rate)
    for option in given:
        if not option.owner and option.name in idle:
            del options[option.name]
    make = importlib.import_module("thalweg.torch").optimizer(rule)
    optimizer: Optimizer = make(list(module.named_parameters()), lr=rate, variant=variant, **options)
    return optimizer


def build_mixture(name: str, make: Any, module: nn.Module, given: Sequence[Given]) -> Optimizer:
    """A mixture that a function makes of a module; its options are those of its rules, and of the whole step."""
    rules = MIXTURES.get(name, ())
    options: dict[str, Any] = {rule.lower(): {} for rule in rules}
    for option in given:
        if option.name in WHOLE_STEP:
            options[option.name] = option.value
            continue
        for rule in rules:
            if option.name in option_names(RULES[rule]):
                options[rule.lower()][option.name] = option.value
    try:
        optimizer: Optimizer = make(module, **options)
        stepped = {id(treatment.p) for treatment in optimizer._treatments()}
    except OptimError:
        raise
    except Exception as error:
        wanted = "a rule, or a function that takes a model and returns an optimizer of thalweg.torch"
        raise CommandError(f"{name} could not be made, it must be {wanted}: {describe_error(error)}") from error
    for path, p in module.named_parameters():
        if p.requires_grad and id(p) not in stepped:
            raise ParameterError(f"it leaves out parameter {path!r}")
    return optimizer
