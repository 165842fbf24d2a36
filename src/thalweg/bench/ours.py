"""Our own optimizers, in every front end, with the settings that all contestants of a rule share."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from thalweg.bench.contestants import Contestant, Ready, Stepping, ready_numpy, ready_optax, ready_torch
from thalweg.errors import CommandError, RuleError
from thalweg.plan.costs import bytes_moved
from thalweg.plan.models import Model
from thalweg.plan.optimizers import build_module, setting_of
from thalweg.programs import budget
from thalweg.settings import Setting, option_names
from thalweg.show import registered
from thalweg.show.arguments import Given
from thalweg.show.registered import MIXTURES, is_mixture

if TYPE_CHECKING:
    from thalweg.bench.workload import Workload

#: The optimizers that are compared by default.
USUAL = ("lamb", "lars", "adafactor")
#: Instead of a list: every rule.
ALL = "all"
#: What rules are given beside ``lr``; those that are not here have their defaults.
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "LAMB": dict(lr=1e-3, weight_decay=0.01),
    "LARS": dict(lr=10.0, weight_decay=1e-4),  # a thousandth of which is seen in bfloat16
    "Adafactor": dict(lr=1e-3),
    "Muon": dict(lr=1e-3, vectors="row"),  # every model has vectors
    "Kron": dict(lr=1e-3, precond_update_probability=1.0),
    "AdamW": dict(lr=1e-3, weight_decay=0.01),
    "SGD": dict(lr=1e-3, momentum=0.9),
}
#: A shape by which state and passes are told.
MATRIX = (1024, 1024)


def enter(name: str, options: Sequence[Given] = ()) -> Iterator[Contestant]:
    """Contestants of one of our optimizers, one for each front end; mixtures are torch's alone."""
    asked = [option for option in options if concerns(option, name)]
    own = {option.name: option.value for option in asked}
    if is_mixture(name):
        yield enter_mixture(name, own)
        return
    rule = registered.rule_of(name)
    usual = SETTINGS.get(name, dict(lr=1e-3 if rule.default_lr is None else rule.default_lr))
    given: dict[str, Any] = {**usual, **own}
    copies = count_copies(setting_of(name, [*give_to_all(usual), *(o for o in asked if o.name != "lr")]))

    def on_torch(workload: Workload, stepping: Stepping) -> Ready:
        make = registered.torch_optimizer(name)
        return ready_torch(lambda params: make(params, engine=stepping.engine, **given), workload, stepping)

    def on_numpy(workload: Workload, stepping: Stepping) -> Ready:
        make = registered.numpy_optimizer(name)
        return ready_numpy(make(engine=stepping.engine, **given), workload, stepping)

    def on_optax(workload: Workload, stepping: Stepping) -> Ready:
        options = {"learning_rate" if option == "lr" else option: value for option, value in given.items()}
        make = registered.optax_function(name)
        if "layout" in inspect.signature(make).parameters:  # shapes are those that torch's modules have
            options["layout"] = "torch"
        return ready_optax(make(**options), workload, stepping)

    for front_end, make in (("torch", on_torch), ("numpy", on_numpy), ("optax", on_optax)):
        shown = f"thalweg.{front_end} {name.lower() if front_end == 'optax' else name}"
        yield Contestant(shown, name, "thalweg", front_end, make, copies, given)


def enter_mixture(name: str, options: Mapping[str, Any]) -> Contestant:
    """A function that makes an optimizer of a model. Ours get the engine that is asked for, a user's only the model."""
    ready_made = name in MIXTURES

    def make(workload: Workload, stepping: Stepping) -> Ready:
        function: Callable[..., Any] = registered.torch_mixture(name)
        given = {**(dict(engine=stepping.engine) if ready_made else {}), **options}
        return ready_torch(
            lambda params: function(build_module(dict(zip(workload.names, params, strict=True))), **given),
            workload,
            stepping,
        )

    return Contestant(f"thalweg.torch {name}" if ready_made else name, name, "thalweg", "torch", make, 4, options)


def concerns(option: Given, name: str) -> bool:
    """Whether an optimizer has an option, or is the one that it was given for."""
    if option.owner:
        return option.owner == name
    return not is_mixture(name) and option.name in (*option_names(registered.rule_of(name)), "lr", "variant")


def check_options(options: Sequence[Given], names: Sequence[str]) -> None:
    for option in options:
        if not any(concerns(option, name) for name in names):
            who = f"{option.owner} is not among the optimizers" if option.owner else "no optimizer here has it"
            raise CommandError(f"--option {option.name} has no effect: {who}: {', '.join(names)}")


def give_to_all(options: Mapping[str, Any]) -> list[Given]:
    """Options that may have no effect."""
    return [Given("", *pair) for pair in options.items()]


def count_copies(setting: Setting) -> int:
    """How often the parameters' memory is needed, for themselves and for state."""
    sizes = budget.sizes_of(setting, MATRIX, "float32")
    state = sum(sizes[key] for key in setting.rule_at(1).entries(MATRIX))
    return 1 + round(state / (4 * math.prod(MATRIX)))


def count_floor(name: str, options: Mapping[str, Any], model: Model) -> int | None:
    """Bytes that a step of the whole model must move; None where memory is not what limits it.

    >>> from thalweg.plan.models import builtin
    >>> gpt2 = builtin("gpt2")
    >>> [round(count_floor(rule, {}, gpt2) / gpt2.parameters, 1) for rule in ("LAMB", "LARS", "Adafactor", "AdamW")]
    [40.0, 28.0, 24.0, 28.0]
    """
    if is_mixture(name):
        return None
    setting = setting_of(name, give_to_all(options))
    try:
        budget.passes_of(setting, MATRIX, "float32")
    except RuleError:  # matrix products take longer than memory does
        return None
    return sum(bytes_moved(setting, tensor) for tensor in model.tensors)
