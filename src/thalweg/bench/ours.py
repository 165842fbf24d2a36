"""Our own optimizers, in every front end, with the settings that all contestants of a rule share."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from thalweg.bench.contestants import Contestant, Ready, Stepping, ready_numpy, ready_optax, ready_torch
from thalweg.errors import RuleError
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
    asked = [o for o in options if o.owner == name or (not o.owner and o.name in options_of(name))]
    own = {option.name: option.value for option in asked}
    if is_mixture(name):
        yield enter_mixture(name, own)
        return
    rule = registered.rule_of(name)
    usual = SETTINGS.get(name, dict(lr=1e-3 if rule.default_lr is None else rule.default_lr))
    given: dict[str, Any] = {**usual, **own}
    copies = count_copies(setting_of(name, [*give_to_all(usual), *(o for o in asked if o.name != "lr")]))

    for front_end in ("torch", "numpy", "optax"):
        shown = f"thalweg.{front_end} {name.lower() if front_end == 'optax' else name}"
        make = partial(make_ready, name, front_end, given)
        yield Contestant(shown, name, "thalweg", front_end, make, copies, given)


def make_ready(name: str, front_end: str, given: Mapping[str, Any], workload: Workload, stepping: Stepping) -> Ready:
    """A rule in one of the front ends. given: its options."""
    kind = registered.optimizer_of(front_end, name)
    if front_end == "torch":
        return ready_torch(lambda params: kind(params, engine=stepping.engine, **given), workload, stepping)
    if front_end == "numpy":
        return ready_numpy(kind(engine=stepping.engine, **given), workload, stepping)
    options = {"learning_rate" if option == "lr" else option: value for option, value in given.items()}
    if "layout" in inspect.signature(kind).parameters:  # shapes are those that torch's modules have
        options["layout"] = "torch"
    return ready_optax(kind(**options), workload, stepping)


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


def options_of(name: str) -> list[str]:
    """Options for all that an optimizer has; a mixture has those alone that are for it."""
    return [] if is_mixture(name) else [*option_names(registered.rule_of(name)), "lr", "variant"]


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
