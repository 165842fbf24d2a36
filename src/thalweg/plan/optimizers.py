"""The optimizers that are planned, by name: the real ones, of a module that takes no memory."""

from __future__ import annotations

import importlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from thalweg.errors import CommandError, OptimError, ParameterError, RuleError
from thalweg.given import GONE
from thalweg.rules import RULES, AdamW, Kron, Muon, Rule
from thalweg.settings import WHOLE_STEP, Settings, find_idle, option_names
from thalweg.show.arguments import Given, suggest
from thalweg.show.modules import describe_error, import_attribute
from thalweg.trial import check_rule

if TYPE_CHECKING:
    from torch import nn

    from thalweg.torch import Optimizer

#: Options of rules that are usual and not their defaults.
USUAL: Mapping[str, Mapping[str, Any]] = {"SGD": {"momentum": 0.9}}
#: Mixtures of ``thalweg.torch``: the rules whose options they take, each under its name in small letters.
MIXTURES: Mapping[str, tuple[type[Rule], ...]] = {"muon_adamw": (Muon, AdamW), "kron_adamw": (Kron, AdamW)}
#: What a learning rate is called, here and in optax.
RATE_NAMES = ("lr", "learning_rate")


@dataclass(frozen=True)
class Candidate:
    """An optimizer that can be planned: one rule, or a mixture."""

    name: str
    #: The rules whose options it takes.
    rules: tuple[type[Rule], ...]
    #: A function of the user's that makes the optimizer of a module.
    function: Callable[..., Any] | None = None
    #: How it was asked for, which tells it from others of its name.
    path: str = field(default="", compare=False)

    @property
    def options(self) -> list[str]:
        names = [option for rule in self.rules for option in option_names(rule)]
        return [*names, "variant"] if len(self.rules) == 1 else names


def find_optimizers(references: Iterable[Any]) -> list[Candidate]:
    """Each optimizer once, in this order; several of one name are told apart by their paths."""
    found = list(dict.fromkeys(map(find_optimizer, references)))
    counts = Counter(candidate.name.lower() for candidate in found)
    return [replace(each, name=each.path) if counts[each.name.lower()] > 1 else each for each in found]


def find_optimizer(reference: Any) -> Candidate:
    """The optimizer that is given by name, as ``module:MyRule``, as ``module:function`` for a mixture, or as a class.

    >>> [find_optimizer(name).name for name in ("lamb", "muon_adamw")]
    ['LAMB', 'muon_adamw']
    """
    packaged = {name.lower(): name for name in (*RULES, *MIXTURES)}
    if isinstance(reference, str) and ":" not in reference:
        name = packaged.get(reference.strip().lower())
        if name is None:
            raise CommandError(f"there is no optimizer {reference.strip()!r}: {suggest(reference, packaged.values())}")
        return Candidate(name, MIXTURES[name] if name in MIXTURES else (RULES[name],), path=name)
    value = reference
    if isinstance(reference, str):
        value, _ = import_attribute(reference.strip(), "rule", "mymodule:MyRule", is_rule)
    if not inspect.isfunction(value):
        try:
            check_rule(value)
        except RuleError as error:
            raise CommandError(f"{reference}: {error}") from None
    path = reference.strip() if isinstance(reference, str) else f"{value.__module__}:{value.__qualname__}"
    is_taken = value.__name__.lower() in packaged and RULES.get(value.__name__) is not value
    name = path if is_taken else value.__name__
    return Candidate(name, (), value, path) if inspect.isfunction(value) else Candidate(name, (value,), path=path)


def is_rule(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Rule)


def resolve_options(options: Iterable[Given], planned: Sequence[Candidate]) -> list[Given]:
    """Options with their optimizers as those are spelt here; raise for one that no optimizer here has."""
    given = []
    for option in options:
        if option.name in RATE_NAMES:
            raise CommandError(f"no figure depends on the learning rate: leave out --option {option.spelt}")
        owners = [find_owner(option, planned)] if option.owner else planned
        names = sorted({name for owner in owners for name in owner.options})
        if option.name not in names:
            told = f"{owners[0].name} has no option" if option.owner else "no optimizer here has an option"
            hint = f"it is gone since 0.3: {GONE[option.name]}" if option.name in GONE else suggest(option.name, names)
            raise CommandError(f"{told} {option.name!r}: {hint if names else 'it takes none'}")
        given.append(option._replace(owner=owners[0].name) if option.owner else option)
    return given


def find_owner(option: Given, planned: Sequence[Candidate]) -> Candidate:
    """The optimizer that an option is for, however it is spelt."""
    for candidate in planned:
        if option.owner.strip().lower() in (candidate.name.lower(), candidate.path.lower()):
            return candidate
    told = f"the option {option.spelt} is for {find_optimizer(option.owner).name}, which is not among the optimizers"
    raise CommandError(f"{told}: {', '.join(candidate.name for candidate in planned)}")


def build_optimizer(candidate: Candidate, module: nn.Module, given: Sequence[Given]) -> Optimizer:
    """The optimizer itself; ParameterError says what it does not take of the module."""
    ours = [o for o in given if o.owner == candidate.name or (not o.owner and o.name in candidate.options)]
    build = build_of_rule if len(candidate.rules) == 1 else build_mixture
    return build(candidate, module, ours)


def build_of_rule(candidate: Candidate, module: nn.Module, given: Sequence[Given]) -> Optimizer:
    """An optimizer of one rule; an option that is for all of them may have no effect on it."""
    from thalweg.torch import optimizer as optimizer_of

    (rule,), usual = candidate.rules, USUAL.get(candidate.name, {})
    rate = 1e-3 if rule.default_lr is None and not rule.lr_optional else rule.default_lr
    options = {o.name: o.value for o in given}
    variant = options.pop("variant", None)
    idle = find_idle(Settings(rule, {**usual, **options}, variant).base.rule, rate)
    for option in given:
        if not option.owner and option.name in idle:
            del options[option.name]
    params = list(module.named_parameters())
    return optimizer_of(rule)(params, lr=rate, variant=variant, **{**usual, **options})


def build_mixture(candidate: Candidate, module: nn.Module, given: Sequence[Given]) -> Optimizer:
    """A mixture that a function makes of a module; its options are those of its rules, and of the whole step."""
    options: dict[str, Any] = {rule.__name__.lower(): {} for rule in candidate.rules}
    for option in given:
        if option.name in WHOLE_STEP:
            options[option.name] = option.value
            continue
        for rule in candidate.rules:
            if option.name in option_names(rule):
                options[rule.__name__.lower()][option.name] = option.value
    make = candidate.function or getattr(importlib.import_module("thalweg.torch"), candidate.name)
    try:
        optimizer: Optimizer = make(module, **options)
        stepped = {id(each.p) for each in optimizer._treatments()}
    except OptimError:
        raise
    except Exception as error:
        wanted = "a rule, or a function that takes a model and returns an optimizer of thalweg.torch"
        raise CommandError(
            f"{candidate.name} could not be made, it must be {wanted}: {describe_error(error)}"
        ) from error
    for path, p in module.named_parameters():
        if p.requires_grad and id(p) not in stepped:
            raise ParameterError(f"it leaves out parameter {path!r}")
    return optimizer
