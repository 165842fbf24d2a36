"""The optimizers that can be planned, by name, with the options that were asked for: rules, and mixtures of them."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

from thalweg.arrays import Shape
from thalweg.errors import CommandError, OptimError, OptionError, ParameterError
from thalweg.given import NORM, TABLE, check_known
from thalweg.plan.models import Model, Tensor
from thalweg.rules import Rule
from thalweg.settings import WHOLE_STEP, Setting, Settings, option_names
from thalweg.show import arguments, registered
from thalweg.show.arguments import suggest
from thalweg.show.modules import describe_error
from thalweg.show.registered import OWN, ByRule, name_rule, rule_of

#: Every optimizer of one rule: the rule it follows, and options that are usual and not its defaults.
OPTIMIZERS: Mapping[str, tuple[str, Mapping[str, Any]]] = ByRule(
    {"SGD": ("SGD", {"momentum": 0.9})}, lambda rule: (rule, {})
)
#: Mixtures of ``thalweg.torch``: the rules whose options they take, each under its name in small letters.
MIXTURES: Mapping[str, tuple[str, ...]] = {"muon_adamw": ("Muon", "AdamW"), "kron_adamw": ("Kron", "AdamW")}
#: How people call it.
LEARNING_RATES = ("lr", "learning_rate")


class Assigned(NamedTuple):
    """What holds for one parameter, and its learning rate."""

    setting: Setting
    lr: Any


class Refused(Exception):
    """Why an optimizer does not take a model."""


@dataclass(frozen=True)
class Option:
    """An option, for one optimizer or for all that have it."""

    name: str
    value: Any
    optimizer: str | None = None

    def __str__(self) -> str:
        return f"{self.optimizer.lower()}.{self.name}" if self.optimizer else self.name


def parse_option(text: str) -> Option:
    """An option as the command line has it: ``momentum_dtype=bfloat16``, ``kron.max_size_dense=2048``.

    >>> parse_option("kron.max_size_dense=2048")
    Option(name='max_size_dense', value=2048, optimizer='Kron')
    """
    owner, name, value = arguments.parse_option(text)
    return Option(name, value, resolve_optimizer(owner) if owner else None)


def resolve_optimizer(name: Any) -> str:
    """The optimizer of that name as it is spelt here: ``adamw`` is AdamW. module:function names a mixture."""
    if isinstance(name, str) and ":" in name and not is_rule(registered.import_attribute(name.strip())):
        return name.strip()
    name = str(name_rule(name)).strip()
    every = (*OPTIMIZERS, *MIXTURES)
    found = next((known for known in (*every, *OWN) if known.lower() == name.lower()), None)
    if found is None:
        hint, known = suggest(name, every), f"here are {', '.join(every)}"
        raise CommandError(f"there is no optimizer {name!r}: {hint if hint.endswith(known) else f'{hint} T{known}'}")
    return found


def is_rule(value: Any) -> bool:
    """Whether a value of a user's module is a class, which must be a rule, and not a function that makes a mixture."""
    return inspect.isclass(value) or not callable(value)


def is_mixture(name: str) -> bool:
    return name in MIXTURES or (":" in name and name not in OWN)


def rules_of(name: str) -> tuple[str, ...]:
    """The names of the rules whose options an optimizer takes."""
    if is_mixture(name):
        return MIXTURES.get(name, ())
    return (OPTIMIZERS[name][0],)


def setting_of(name: str, options: Iterable[Option] = ()) -> Setting:
    """What holds for the parameters of an optimizer of one rule, options checked by the rule.

    An option for this optimizer alone must have an effect; one for all may have none here.
    """
    name, options = resolve_optimizer(name), tuple(options)
    rule_name, own = OPTIMIZERS[name]
    given = options_for(name, rule_name, options)
    variant = given.pop("variant", None)
    try:
        rule = rule_of(rule_name)
        check_known(rule, given, option_names(rule))
        settings = Settings(rule, {**own, **given}, variant)
        everywhere = {option.name for option in options if option.optimizer is None}
        settings.validate_lr(rate_of(rule), unasked={*own, *everywhere})
    except OptionError as error:
        told = str(error)
        raise CommandError(told if told.startswith(name) else f"{name}: {told}") from None
    return settings.base


def rate_of(rule: type[Rule]) -> float | None:
    """The learning rate that front ends take by themselves. Nothing that is planned depends on it but warnings."""
    return 1e-3 if rule.default_lr is None and not rule.lr_optional else rule.default_lr


def options_for(name: str, rule: str, options: Iterable[Option]) -> dict[str, Any]:
    """The options that a rule of an optimizer is given: those for it, and of those for all the ones that it has."""
    has = (*option_names(rule_of(rule)), "variant")
    return {o.name: o.value for o in options if o.optimizer == name or (o.optimizer is None and o.name in has)}


# ---- which parameter is stepped by what


def assign(name: str, model: Model, options: Sequence[Option] = ()) -> list[Assigned]:
    """What holds for each parameter of a model; Refused says which of them the optimizer does not take."""
    if is_mixture(name):
        return assign_mixture(name, model, options)
    setting = setting_of(name, options)
    refused = [tensor for tensor in model.tensors if reason_against(setting.rule, tensor)]
    if refused:
        first = reason_against(setting.rule, refused[0])
        raise Refused(f"it refuses {len(refused)} of {len(model.tensors)} parameters: {first}")
    return [Assigned(setting, rate_of(type(setting.rule)))] * len(model.tensors)


def reason_against(rule: Rule, tensor: Tensor) -> str:
    """Why a rule does not take a parameter, as its optimizer tells it; "" if it does."""
    try:
        rule.check_shape(tensor.name, tensor.shape)
    except (ParameterError, OptionError) as error:
        return str(error)
    return ""


def assign_mixture(name: str, model: Model, options: Sequence[Option]) -> list[Assigned]:
    """Ask the mixture itself, which torch makes for the model without memory."""
    if importlib.util.find_spec("torch") is None:
        raise Refused('mixtures are planned where torch is installed: pip install "thalweg[torch]"')
    taken = [option for option in options if option.optimizer in (None, name)]
    has = {rule.lower(): set(option_names(rule_of(rule))) - {*WHOLE_STEP} for rule in rules_of(name)}
    given: dict[str, Any] = {rule: {o.name: o.value for o in taken if o.name in own} for rule, own in has.items()}
    whole = WHOLE_STEP if has else ()
    given |= {option.name: option.value for option in taken if option.name in whole}
    for option in taken:
        if option.optimizer == name and option.name not in {*whole}.union(*has.values()):
            known = ", ".join(rules_of(name)) or "it is planned as it is written"
            raise CommandError(f"{name} has no rule with an option {option.name!r}: {known}")
    module = model.module if model.module is not None else build_stand_in((*model.tensors, *model.frozen))
    trained = {tensor.name for tensor in model.tensors}
    names = {}
    for path, p in module.named_parameters():
        p.requires_grad_(path in trained)
        names[id(p)] = path
    make = registered.torch_mixture(name) if name in MIXTURES else registered.import_attribute(name)
    try:
        optimizer = make(module, **given)
        found = {names.get(id(each.p)): Assigned(each.setting, each.lr) for each in optimizer._treatments()}
    except OptimError as error:
        raise Refused(str(error)) from None
    except Exception as error:
        wanted = "a rule, or a function that takes a model and returns an optimizer of thalweg.torch"
        raise CommandError(
            f"{name} could not be made for {model.name}, it must be {wanted}: {describe_error(error)}"
        ) from error
    for tensor in model.tensors:
        if tensor.name not in found:
            raise Refused(f"it leaves out parameter {tensor.name!r}")
    return [found[tensor.name] for tensor in model.tensors]


def build_stand_in(tensors: Iterable[Tensor]) -> Any:
    """A module without memory for a model that is known by names and shapes alone: names tell what its modules are."""
    import torch
    from torch import nn

    class Norm(nn.Module):
        """A norm, whatever it computes."""

    class Conv1D(nn.Module):
        """A linear layer of GPT-2, stored (in, out)."""

    def module_for(name: str, own: str, shape: Shape) -> Any:
        """A module that has parameters. own: what its first one is called."""
        if NORM.search(name):
            return Norm()
        if TABLE.search(name):
            return nn.Embedding(1, 1, device="meta")
        if own == "weight" and len(shape) == 2 and name in ("c_attn", "c_fc", "c_proj"):
            return Conv1D()
        if own == "weight" and len(shape) == 2:
            return nn.Linear(shape[1], shape[0], device="meta")
        if own == "weight" and 3 <= len(shape) <= 5:
            convolution: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(shape) - 3]
            return convolution(shape[1], shape[0], shape[2:], device="meta")
        return nn.Module()

    root = nn.Module()
    for tensor in tensors:
        module: Any = root
        *path, own = tensor.name.split(".")
        for name, following in zip_longest(path, path[1:]):
            if name not in module._modules:
                inner = nn.ModuleList() if following and following.isdecimal() else nn.Module()
                module._modules[name] = inner if following else module_for(name, own, tensor.shape)
                module._modules[name]._parameters.clear()
            module = module._modules[name]
        dtype = getattr(torch, tensor.dtype, torch.float32)
        data = torch.empty(tensor.shape, dtype=dtype if dtype.is_floating_point else torch.float32, device="meta")
        module._parameters[own] = nn.Parameter(data)
    return root


# ---- options


def check_used(options: Iterable[Option], settings: Mapping[str, Setting]) -> None:
    """Say which option concerns none of the optimizers that are planned. settings: of those that have one rule."""
    for option in options:
        if option.optimizer is not None:
            continue
        rules = {name: setting.rule for name, setting in settings.items() if applies(option, name)}
        idle = [rule.idle(rate_of(type(rule))).get(option.name) for rule in rules.values()]
        if idle and all(idle):
            raise CommandError(f"the option {option} has no effect on any optimizer here: it needs {idle[0]}")


def applies(option: Option, name: str) -> bool:
    """Whether an option for all concerns this optimizer: it is one of its rules'."""
    return any(option.name in (*option_names(rule_of(rule)), "variant") for rule in rules_of(name))


def check_known_options(options: Iterable[Option], names: Sequence[str]) -> None:
    """Say which option none of the optimizers has."""
    for option in options:
        if option.optimizer is not None and option.optimizer not in names:
            raise CommandError(
                f"the option {option} is for {option.optimizer}, which is not among the optimizers: {', '.join(names)}"
            )
        if option.name in LEARNING_RATES:
            raise CommandError(f"nothing that is planned depends on the learning rate: leave out --option {option}")
        if option.optimizer is None and not any(applies(option, name) for name in names):
            known = {own for name in names for rule in rules_of(name) for own in option_names(rule_of(rule))}
            hint = suggest(option.name, sorted(known))
            raise CommandError(f"no optimizer here has an option {option.name!r}: {hint}")
