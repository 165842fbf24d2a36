"""The optimizers that can be planned, by name, with the options that were asked for: rules, and mixtures of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from thalweg.arrays import Shape
from thalweg.errors import CommandError, OptimError, OptionError, ParameterError
from thalweg.given import NORM, TABLE, check_known
from thalweg.plan.models import Model, Tensor
from thalweg.rules import RULES, Rule
from thalweg.settings import WHOLE_STEP, Setting, Settings, option_names
from thalweg.show.arguments import Given, suggest
from thalweg.show.modules import describe_error
from thalweg.show.registered import (
    MIXTURES,
    OWN,
    OWN_MIXTURES,
    RATE_NAMES,
    is_mixture,
    name_rule,
    rule_of,
    torch_mixture,
)

#: Options of rules that are usual and not their defaults.
USUAL: Mapping[str, Mapping[str, Any]] = {"SGD": {"momentum": 0.9}}
#: Mixtures of ``thalweg.torch``: the rules whose options they take, each under its name in small letters.
PARTS: Mapping[str, tuple[str, ...]] = {"muon_adamw": ("Muon", "AdamW"), "kron_adamw": ("Kron", "AdamW")}


class Assigned(NamedTuple):
    """What holds for one parameter, and its learning rate."""

    setting: Setting
    lr: Any


class Refused(Exception):
    """Why an optimizer does not take a model."""


def resolve_optimizer(reference: Any) -> str:
    """The name of an optimizer that is given by name, as ``module:MyRule``, ``module:function`` or a class.

    >>> resolve_optimizer("lamb"), resolve_optimizer("muon_adamw")
    ('LAMB', 'muon_adamw')
    """
    name = str(name_rule(reference)).strip()
    every = (*RULES, *MIXTURES)
    found = next((known for known in (*every, *OWN, *OWN_MIXTURES) if known.lower() == name.lower()), None)
    if found is None:
        hint, known = suggest(name, every), f"here are {', '.join(every)}"
        raise CommandError(f"there is no optimizer {name!r}: {hint if hint.endswith(known) else f'{hint} T{known}'}")
    return found


def rules_of(name: str) -> tuple[str, ...]:
    """The names of the rules whose options an optimizer takes."""
    return PARTS.get(name, ()) if is_mixture(name) else (name,)


def setting_of(name: str, options: Iterable[Given] = ()) -> Setting:
    """What holds for the parameters of an optimizer of one rule, options checked by the rule.

    An option for this optimizer alone must have an effect; one for all may have none here.
    """
    name, options = resolve_optimizer(name), tuple(options)
    rule, own = rule_of(name), USUAL.get(name, {})
    given = {option.name: option.value for option in options if applies(option, name)}
    variant = given.pop("variant", None)
    try:
        check_known(rule, given, option_names(rule))
        settings = Settings(rule, {**own, **given}, variant)
        settings.validate_lr(rate_of(rule), unasked={*own, *(option.name for option in options if not option.owner)})
    except OptionError as error:
        told = str(error)
        raise CommandError(told if told.startswith(name) else f"{name}: {told}") from None
    return settings.base


def rate_of(rule: type[Rule]) -> float | None:
    """The learning rate that front ends take by themselves. Nothing that is planned depends on it but warnings."""
    return 1e-3 if rule.default_lr is None and not rule.lr_optional else rule.default_lr


# ---- which parameter is stepped by what


def assign(name: str, model: Model, options: Sequence[Given] = ()) -> list[Assigned]:
    """What holds for each parameter of a model; Refused says which of them the optimizer does not take."""
    if is_mixture(name):
        return assign_mixture(name, model, options)
    setting = setting_of(name, options)
    reasons = [reason for tensor in model.tensors if (reason := reason_against(setting.rule, tensor))]
    if reasons:
        raise Refused(f"it refuses {len(reasons)} of {len(model.tensors)} parameters: {reasons[0]}")
    return [Assigned(setting, rate_of(type(setting.rule)))] * len(model.tensors)


def reason_against(rule: Rule, tensor: Tensor) -> str:
    """Why a rule does not take a parameter, as its optimizer tells it; "" if it does."""
    try:
        rule.check_shape(tensor.name, tensor.shape)
    except (ParameterError, OptionError) as error:
        return str(error)
    return ""


def assign_mixture(name: str, model: Model, options: Sequence[Given]) -> list[Assigned]:
    """Ask the mixture itself, which torch makes for the model without memory."""
    if importlib.util.find_spec("torch") is None:
        raise Refused('mixtures are planned where torch is installed: pip install "thalweg[torch]"')
    taken = [option for option in options if option.owner in ("", name)]
    has = {rule.lower(): set(option_names(rule_of(rule))) - {*WHOLE_STEP} for rule in rules_of(name)}
    given: dict[str, Any] = {rule: {o.name: o.value for o in taken if o.name in own} for rule, own in has.items()}
    whole = WHOLE_STEP if has else ()
    given |= {option.name: option.value for option in taken if option.name in whole}
    for option in taken:
        if option.owner and option.name not in {*whole}.union(*has.values()):
            known = ", ".join(rules_of(name)) or "it is planned as it is written"
            raise CommandError(f"{name} has no rule with an option {option.name!r}: {known}")
    module = model.module if model.module is not None else build_stand_in((*model.tensors, *model.frozen))
    trained = {tensor.name for tensor in model.tensors}
    names = {}
    for path, p in module.named_parameters():
        p.requires_grad_(path in trained)
        names[id(p)] = path
    try:
        optimizer = torch_mixture(name)(module, **given)
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
    """A module without memory for a model that is known by names and shapes alone."""
    import torch
    from torch import nn

    params = {}
    for tensor in tensors:
        dtype = getattr(torch, tensor.dtype, torch.float32)
        dtype = dtype if dtype.is_floating_point else torch.float32
        params[tensor.name] = nn.Parameter(torch.empty(tensor.shape, dtype=dtype, device="meta"))
    return build_module(params)


def build_module(params: Mapping[str, Any]) -> Any:
    """A module around parameters: names and shapes tell what its modules are."""
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
    for full_name, p in params.items():
        module: Any = root
        *path, own = full_name.split(".")
        for name, following in zip_longest(path, path[1:]):
            if name not in module._modules:
                inner = nn.ModuleList() if following and following.isdecimal() else nn.Module()
                module._modules[name] = inner if following else module_for(name, own, tuple(p.shape))
                module._modules[name]._parameters.clear()
            module = module._modules[name]
        module._parameters[own] = p
    return root


# ---- options


def resolve_owners(options: Iterable[Given]) -> tuple[Given, ...]:
    """Options with the names of their optimizers as they are spelt here."""
    return tuple(o._replace(owner=resolve_optimizer(o.owner)) if o.owner else o for o in options)


def check_used(options: Iterable[Given], settings: Mapping[str, Setting]) -> None:
    """Say which option concerns none of the optimizers that are planned. settings: of those that have one rule."""
    for option in options:
        if option.owner:
            continue
        rules = {name: setting.rule for name, setting in settings.items() if applies(option, name)}
        idle = [rule.idle(rate_of(type(rule))).get(option.name) for rule in rules.values()]
        if idle and all(idle):
            raise CommandError(f"the option {option.name} has no effect on any optimizer here: it needs {idle[0]}")


def applies(option: Given, name: str) -> bool:
    """Whether an optimizer has an option for all, or one is for it alone."""
    return option.owner == name if option.owner else option.name in options_of(name)


def options_of(name: str) -> list[str]:
    """What an optimizer's rules have."""
    return [option for rule in rules_of(name) for option in (*option_names(rule_of(rule)), "variant")]


def check_rates_left_out(options: Iterable[Given]) -> None:
    for option in options:
        if option.name in RATE_NAMES:
            raise CommandError(
                f"nothing that is planned depends on the learning rate: leave out --option {option.spelt}"
            )
