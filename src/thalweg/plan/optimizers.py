"""The optimizers that are planned, by name: the real ones, of a module that takes no memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from thalweg.errors import CommandError, OptimError, ParameterError
from thalweg.rules import RULES
from thalweg.settings import WHOLE_STEP, Settings, find_idle, option_names
from thalweg.show.arguments import Given, check_options, suggest
from thalweg.show.modules import describe_error
from thalweg.show.registered import (
    MIXTURES,
    OWN,
    OWN_MIXTURES,
    RATE_NAMES,
    is_mixture,
    name_rule,
    optimizer_of,
    rule_of,
    torch_mixture,
)

if TYPE_CHECKING:
    from torch import nn

    from thalweg.torch import Optimizer

#: Options of rules that are usual and not their defaults.
USUAL: Mapping[str, Mapping[str, Any]] = {"SGD": {"momentum": 0.9}}
#: Mixtures of ``thalweg.torch``: the rules whose options they take, each under its name in small letters.
PARTS: Mapping[str, tuple[str, ...]] = {"muon_adamw": ("Muon", "AdamW"), "kron_adamw": ("Kron", "AdamW")}


def resolve_optimizer(reference: Any) -> str:
    """The name of an optimizer that is given by name, as ``module:MyRule``, ``module:function`` or a class.

    >>> resolve_optimizer("lamb"), resolve_optimizer("muon_adamw")
    ('LAMB', 'muon_adamw')
    """
    name = str(name_rule(reference)).strip()
    known = (*RULES, *MIXTURES)
    found = next((each for each in (*known, *OWN, *OWN_MIXTURES) if each.lower() == name.lower()), None)
    if found is None:
        raise CommandError(f"there is no optimizer {name!r}: {suggest(name, known)}")
    return found


def resolve_options(options: Iterable[Given], names: Sequence[str]) -> list[Given]:
    """Options with the names of their optimizers as they are spelt here; those that nobody here has are refused."""
    given = [o._replace(owner=resolve_optimizer(o.owner)) if o.owner else o for o in options]
    for option in given:
        if option.name in RATE_NAMES:
            raise CommandError(f"no figure depends on the learning rate: leave out --option {option.spelt}")
    check_options(given, {name: option_names_of(name) for name in names})
    return given


def rules_of(name: str) -> tuple[str, ...]:
    """The names of the rules whose options an optimizer takes."""
    return PARTS.get(name, ()) if is_mixture(name) else (name,)


def option_names_of(name: str) -> list[str]:
    return [option for rule in rules_of(name) for option in (*option_names(rule_of(rule)), "variant")]


def build_optimizer(name: str, module: nn.Module, given: Sequence[Given]) -> Optimizer:
    """The optimizer itself; ParameterError says what it does not take of the module."""
    ours = [o for o in given if o.owner == name or (not o.owner and o.name in option_names_of(name))]
    return build_mixture(name, module, ours) if is_mixture(name) else build_of_rule(name, module, ours)


def build_of_rule(name: str, module: nn.Module, given: Sequence[Given]) -> Optimizer:
    """An optimizer of one rule; an option that is for all of them may have no effect on it."""
    rule, usual = rule_of(name), USUAL.get(name, {})
    rate = 1e-3 if rule.default_lr is None and not rule.lr_optional else rule.default_lr
    options = {o.name: o.value for o in given}
    variant = options.pop("variant", None)
    idle = find_idle(Settings(rule, {**usual, **options}, variant).base.rule, rate)
    for option in given:
        if not option.owner and option.name in idle:
            del options[option.name]
    params = list(module.named_parameters())
    optimizer: Optimizer = optimizer_of("torch", name)(params, lr=rate, variant=variant, **{**usual, **options})
    return optimizer


def build_mixture(name: str, module: nn.Module, given: Sequence[Given]) -> Optimizer:
    """A mixture that a function makes of a module; its options are those of its rules, and of the whole step."""
    options: dict[str, Any] = {rule.lower(): {} for rule in rules_of(name)}
    for option in given:
        for rule in rules_of(name):
            if option.name in WHOLE_STEP:
                options[option.name] = option.value
            elif option.name in option_names(rule_of(rule)):
                options[rule.lower()][option.name] = option.value
    try:
        optimizer: Optimizer = torch_mixture(name)(module, **options)
        stepped = {id(each.p) for each in optimizer._treatments()}
    except OptimError:
        raise
    except Exception as error:
        wanted = "a rule, or a function that takes a model and returns an optimizer of thalweg.torch"
        raise CommandError(f"{name} could not be made, it must be {wanted}: {describe_error(error)}") from error
    for path, p in module.named_parameters():
        if p.requires_grad and id(p) not in stepped:
            raise ParameterError(f"it leaves out parameter {path!r}")
    return optimizer
