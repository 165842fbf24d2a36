"""The optimizers that are planned, by name: the real ones, of a module that takes no memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from thalweg.errors import CommandError, OptimError, ParameterError
from thalweg.plan.models import hidden_by_name
from thalweg.rules import RULES, AdamW, Kron, Muon, Rule
from thalweg.settings import WHOLE_STEP, RuleOptions, find_idle, option_names
from thalweg.show.arguments import Given, check_options, suggest
from thalweg.show.modules import describe_error, import_attribute

if TYPE_CHECKING:
    from torch import nn

    from thalweg.torch import Optimizer

#: Options of rules that are usual and not their defaults.
USUAL: Mapping[str, Mapping[str, Any]] = {"SGD": {"momentum": 0.9}}
#: Mixtures of ``thalweg.torch``: the rules whose options they take, each under its name in small letters.
MIXTURES: Mapping[str, tuple[type[Rule], ...]] = {"muon_adamw": (Muon, AdamW), "kron_adamw": (Kron, AdamW)}


class Candidate(NamedTuple):
    """An optimizer that can be planned: one rule, or what a function makes of a module."""

    #: Of this package, or an import path.
    name: str
    #: The rules whose options it takes.
    rules: tuple[type[Rule], ...]
    function: Callable[..., Any] | None = None

    @property
    def options(self) -> list[str]:
        names = [option for rule in self.rules for option in option_names(rule)]
        return names if self.function else [*names, "variant"]


def find_optimizer(reference: Any) -> Candidate:
    """The optimizer that is given by name, as ``module:MyRule``, as ``module:function`` for a mixture, or as a class.

    >>> [find_optimizer(name).name for name in ("lamb", "muon_adamw")]
    ['LAMB', 'muon_adamw']
    """
    if not isinstance(reference, str):
        if not is_rule(reference):
            raise CommandError(f"an optimizer is a rule, or the name of one, got {reference!r}")
        is_packaged = RULES.get(reference.__name__) is reference
        name = reference.__name__ if is_packaged else f"{reference.__module__}:{reference.__qualname__}"
        return Candidate(name, (reference,))
    packaged = {name.lower(): name for name in (*RULES, *MIXTURES)}
    name = packaged.get(reference.strip().lower(), reference.strip())
    if name in RULES:
        return Candidate(name, (RULES[name],))
    if name not in MIXTURES and ":" not in name:
        raise CommandError(f"there is no optimizer {name!r}: {suggest(name, packaged.values())}")
    path = f"thalweg.torch:{name}" if name in MIXTURES else name
    value, _ = import_attribute(path, "rule", "mymodule:MyRule", is_rule)
    return Candidate(name, (value,)) if is_rule(value) else Candidate(name, MIXTURES.get(name, ()), value)


def is_rule(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Rule)


def resolve_options(options: Iterable[Given], planned: Sequence[Candidate]) -> list[Given]:
    """The options, each with its optimizer's name as Candidate has it; raise for one that no optimizer here has."""
    names = {candidate.name.lower(): candidate.name for candidate in planned}
    given = [option._replace(owner=names.get(option.owner.strip().lower(), option.owner)) for option in options]
    for option in given:
        if option.name in ("lr", "learning_rate"):
            raise CommandError(f"no figure depends on the learning rate: leave out --option {option.spelt}")
    check_options(given, {candidate.name: candidate.options for candidate in planned})
    return given


def build_optimizer(candidate: Candidate, module: nn.Module, given: Sequence[Given]) -> Optimizer:
    """The optimizer itself; ParameterError says what it does not take of the module."""
    named = {option.name: option.value for option in given if option.owner == candidate.name}
    shared = {option.name: option.value for option in given if not option.owner and option.name in candidate.options}
    if candidate.function is None:
        return build_rule(candidate.rules[0], module, named, shared)
    options: dict[str, Any] = {rule.__name__.lower(): {} for rule in candidate.rules}
    for name, value in {**shared, **named}.items():
        rules = [] if name in WHOLE_STEP else [rule for rule in candidate.rules if name in option_names(rule)]
        for rule_options in [options[rule.__name__.lower()] for rule in rules] or [options]:
            rule_options[name] = value
    if candidate.rules and any("." in name for name in module._parameters):
        options["first"] = hidden_by_name(module)
    try:
        optimizer: Optimizer = candidate.function(module, **options)
        stepped = {id(treatment.p) for treatment in optimizer._treatments()}
    except OptimError:
        raise
    except Exception as error:
        wanted = "a rule, or a function that takes a model and returns an optimizer of thalweg.torch"
        reason = describe_error(error)
        raise CommandError(f"{candidate.name} could not be made, it must be {wanted}: {reason}") from error
    for path, p in module.named_parameters():
        if p.requires_grad and id(p) not in stepped:
            raise ParameterError(f"it leaves out parameter {path!r}")
    return optimizer


def build_rule(rule: type[Rule], module: nn.Module, named: Mapping[str, Any], shared: Mapping[str, Any]) -> Optimizer:
    """An optimizer of one rule. shared: options for all optimizers, which may have no effect on this one."""
    from thalweg.torch import optimizer as class_of

    options = {**USUAL.get(rule.__name__, {}), **shared, **named}
    needs_rate = not rule.lr_optional or "graft" in options  # a grafted rule may have none of its own
    rate = 1e-3 if rule.default_lr is None and needs_rate else rule.default_lr
    variant = options.pop("variant", None)
    idle = find_idle(RuleOptions(rule, options, variant).base.rule, rate)
    options = {name: value for name, value in options.items() if name in named or name not in idle}
    return class_of(rule)(list(module.named_parameters()), lr=rate, variant=variant, **options)
