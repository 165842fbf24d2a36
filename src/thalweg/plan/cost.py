"""What an optimizer costs on a model: the real optimizer is built without memory, and its parameters are added up."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from thalweg.arrays import Shape
from thalweg.dtypes import DTYPES
from thalweg.errors import CommandError, OptimError, OptionError, ParameterError
from thalweg.explain import Explanation
from thalweg.given import hint_for
from thalweg.plan.load import Model, load_model
from thalweg.programs import budget
from thalweg.rules import RULES, Rule
from thalweg.rules.entries import Factor
from thalweg.settings import WHOLE_STEP, Setting, Settings, find_idle, option_names
from thalweg.show.arguments import Given, parse_dtype, suggest
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

#: Bytes a second of an H100's memory.
BANDWIDTH = 3.35e12
#: A count of steps is a tensor of float32 for each parameter.
COUNTER_BYTES = 4
#: Options of rules that are usual and not their defaults.
USUAL: Mapping[str, Mapping[str, Any]] = {"SGD": {"momentum": 0.9}}
#: Mixtures of ``thalweg.torch``: the rules whose options they take, each under its name in small letters.
PARTS: Mapping[str, tuple[str, ...]] = {"muon_adamw": ("Muon", "AdamW"), "kron_adamw": ("Kron", "AdamW")}


@dataclass(frozen=True)
class Cost:
    """What one optimizer costs, on each rank if there are several."""

    optimizer: str
    #: By rule, how many tensors and how many parameters it steps.
    rules: Mapping[str, tuple[int, int]]
    #: What is kept between steps.
    state_bytes: int
    #: What a step needs beside it, at most.
    temporary_bytes: int
    #: What a step must read from memory and write to it, at the least, and how long that takes.
    moved_bytes: int
    floor_seconds: float
    #: Parameters, gradients, frozen weights, state and temporaries.
    total_bytes: int
    #: Whether that fits into the memory; None: no memory was named.
    fits: bool | None
    #: Every parameter, as ``optimizer.explain()`` lists them.
    explanation: Explanation = field(repr=False)


@dataclass(frozen=True)
class Plan:
    """What each optimizer costs, and what was asked. Bytes are those of each rank if there are several."""

    model: str
    about: str
    #: Numbers, tensors and dtypes of what is trained, and of what is frozen.
    parameters: int
    tensors: int
    dtypes: Sequence[str]
    frozen_parameters: int
    frozen_tensors: int
    parameter_bytes: int
    gradient_bytes: int
    frozen_bytes: int
    world: int
    bandwidth: float
    memory: int | None
    costs: Sequence[Cost]
    #: Optimizers that do not take this model, and why.
    refused: Mapping[str, str]

    def to_plain(self, *, explain: bool = False) -> dict[str, Any]:
        """All figures, for JSON. explain: every parameter too."""
        plain = asdict(self)
        plain["optimizers"] = plain.pop("costs")
        for cost in plain["optimizers"]:
            explanation = cost.pop("explanation")
            if explain:
                cost["tensors"] = explanation["rows"]
        return plain


def plan(
    model: str | nn.Module,
    *,
    optimizers: Iterable[Any] | None = None,
    options: Iterable[Given] = (),
    dtype: str | None = None,
    frozen: Sequence[str] = (),
    world: int = 1,
    bandwidth: float = BANDWIDTH,
    memory: int | None = None,
) -> Plan:
    """What optimizers will cost on a model, before anything is allocated.

    model: what ``thalweg plan`` takes, or a module, which is not changed. optimizers: names, rules, or functions that
    make an optimizer of a module; all of the package if it is left out. dtype: of parameters and gradients. frozen:
    patterns of the names of parameters that are not trained, ``*.embed*``. world: ranks over which FSDP2 shards.
    bandwidth: bytes a second of memory. memory: bytes that all should fit into.

    >>> [cost.state_bytes for cost in plan("gpt2", optimizers=["SGD", "Adafactor"]).costs]
    [497759824, 1287060]
    """
    for name, value in dict(world=world, bandwidth=bandwidth, memory=memory).items():
        if value is not None and not value > 0:
            raise CommandError(f"{name} must be above 0, got {value}")
    wanted = [*RULES, *MIXTURES] if optimizers is None else optimizers
    names = list(dict.fromkeys(map(resolve_optimizer, wanted)))
    given = check_given_options(options, names)
    stored = None if dtype is None else parse_dtype(dtype)
    loaded = load_model(model, stored) if isinstance(model, str) else Model(type(model).__name__, "a module", model)
    module = prepare_module(loaded, stored, [frozen] if isinstance(frozen, str) else frozen)

    params = list(module.parameters())
    trained, untrained = ([p for p in params if p.requires_grad is wanted] for wanted in (True, False))
    weights, still = (
        sum(math.prod(held_shape(tuple(p.shape), world)) * p.element_size() for p in some)
        for some in (trained, untrained)
    )
    costs, refused = [], dict[str, str]()
    for name in names:
        try:
            optimizer = build_optimizer(name, module, given)
            costs.append(count_cost(name, optimizer, 2 * weights + still, world, bandwidth, memory))
        except ParameterError as error:
            refused[name] = str(error)
        except OptionError as error:
            raise CommandError(str(error) if str(error).startswith(name) else f"{name}: {error}") from None
    if not costs:
        raise CommandError("; ".join(f"{name}: {reason}" for name, reason in refused.items()))
    return Plan(
        loaded.name,
        loaded.about,
        sum(p.numel() for p in trained),
        len(trained),
        list(dict.fromkeys(str(p.dtype).removeprefix("torch.") for p in trained)),
        sum(p.numel() for p in untrained),
        len(untrained),
        weights,
        weights,
        still,
        world,
        bandwidth,
        memory,
        costs,
        refused,
    )


def prepare_module(model: Model, dtype: str | None, frozen: Sequence[str]) -> nn.Module:
    """A copy of a module without memory, in a dtype, with parameters frozen whose names match one of the patterns."""
    import torch
    from torch import nn

    named = list(model.module.named_parameters(remove_duplicate=False))
    for pattern in frozen:
        if not any(fnmatchcase(name, pattern) for name, _ in named):
            some = ", ".join(name for name, _ in named[:3])
            raise CommandError(f"--frozen {pattern} matches no parameter; the first ones are {some}")
    frozen_ids = {id(p) for name, p in named if any(fnmatchcase(name, pattern) for pattern in frozen)}
    copies: dict[int, Any] = {}
    for name, p in named:
        is_trained = p.requires_grad and id(p) not in frozen_ids
        is_known = str(p.dtype).removeprefix("torch.") in DTYPES
        if is_trained and not is_known:
            raise CommandError(
                f"{model.name}: {name!r} has dtype {p.dtype}, which cannot be trained: mark it as not trained with --frozen"
            )
        stored = getattr(torch, dtype) if dtype is not None and is_known else p.dtype
        copies[id(p)] = nn.Parameter(torch.empty(p.shape, dtype=stored, device="meta"), is_trained)
    if not any(p.requires_grad for p in copies.values()):
        raise CommandError(f"{model.name} has no floating-point parameter that requires a gradient")
    return copy.deepcopy(model.module, copies)  # what deepcopy is told of takes the place of what it would copy


# ---- optimizers


def resolve_optimizer(reference: Any) -> str:
    """The name of an optimizer that is given by name, as ``module:MyRule``, ``module:function`` or a class.

    >>> resolve_optimizer("lamb"), resolve_optimizer("muon_adamw")
    ('LAMB', 'muon_adamw')
    """
    name = str(name_rule(reference)).strip()
    known = (*RULES, *MIXTURES)
    found = next((each for each in (*known, *OWN, *OWN_MIXTURES) if each.lower() == name.lower()), None)
    if found is None:
        raise CommandError(f"there is no optimizer {name!r}: {suggest(name, known)}; or module:MyRule, module:function")
    return found


def option_names_of(name: str) -> set[str]:
    """The options that an optimizer takes."""
    rules = PARTS.get(name, ()) if is_mixture(name) else (name,)
    return {option for rule in rules for option in (*option_names(rule_of(rule)), "variant")}


def check_given_options(options: Iterable[Given], names: Sequence[str]) -> list[Given]:
    """The options with the names of their optimizers as they are spelt here."""
    given = [o._replace(owner=resolve_optimizer(o.owner)) if o.owner else o for o in options]
    known = set[str]().union(*map(option_names_of, names))
    for option in given:
        if option.name in RATE_NAMES:
            raise CommandError(f"no figure depends on the learning rate: leave out --option {option.spelt}")
        if option.owner and option.owner not in names:
            raise CommandError(
                f"the option {option.spelt} is for {option.owner}, which is not among the optimizers: {', '.join(names)}"
            )
        if not option.owner and option.name not in known:
            hint = hint_for("", option.name, sorted(known), cutoff=0.6) or f"there are {', '.join(sorted(known))}"
            raise CommandError(f"no optimizer here has an option {option.name!r}: {hint}")
    return given


def find_idle_options(name: str, given: Sequence[Given]) -> Mapping[str, str]:
    """Options for all optimizers that have no effect on this one, with what would give them one."""
    rule = rule_of(name)
    options = {o.name: o.value for o in given if applies(o, name)}
    variant = options.pop("variant", None)
    idle = find_idle(Settings(rule, {**USUAL.get(name, {}), **options}, variant).base.rule, usual_rate(rule))
    return {o.name: idle[o.name] for o in given if not o.owner and o.name in idle and o.name in options}


def applies(option: Given, name: str) -> bool:
    """Whether an option is for this optimizer alone, or for all and this one has it."""
    return option.owner == name or (not option.owner and option.name in option_names_of(name))


def usual_rate(rule: type[Rule]) -> float | None:
    """A learning rate, on which nothing depends but warnings."""
    return 1e-3 if rule.default_lr is None and not rule.lr_optional else rule.default_lr


def build_optimizer(name: str, module: nn.Module, given: Sequence[Given]) -> Optimizer:
    """The optimizer itself, of a module that takes no memory."""
    if is_mixture(name):
        return build_mixture(name, module, given)
    idle = find_idle_options(name, given)
    options = {o.name: o.value for o in given if applies(o, name) and (o.owner or o.name not in idle)}
    make = optimizer_of("torch", name)
    optimizer: Optimizer = make(
        list(module.named_parameters()), lr=usual_rate(rule_of(name)), **{**USUAL.get(name, {}), **options}
    )
    return optimizer


def build_mixture(name: str, module: nn.Module, given: Sequence[Given]) -> Optimizer:
    """A mixture that a function makes of a module; its options are those of its rules, and of the whole step."""
    options: dict[str, Any] = {rule.lower(): {} for rule in PARTS.get(name, ())}
    for option in given:
        if option.owner not in ("", name):
            continue
        takers = [rule for rule in PARTS.get(name, ()) if option.name in option_names(rule_of(rule))]
        if takers and option.name in WHOLE_STEP:
            options[option.name] = option.value
        for rule in takers if option.name not in WHOLE_STEP else ():
            options[rule.lower()][option.name] = option.value
        if option.owner and not takers:
            known = ", ".join(PARTS.get(name, ())) or "it is planned as it is written"
            raise CommandError(f"{name} has no rule with an option {option.name!r}: {known}")
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


# ---- figures


def held_shape(shape: Shape, world: int) -> Shape:
    """What FSDP2 leaves a rank of a tensor, at most: it cuts the first axis into as many equal chunks as there are."""
    return (-(-shape[0] // world), *shape[1:]) if shape else shape


def count_cost(name: str, optimizer: Optimizer, weights: int, world: int, bandwidth: float, memory: int | None) -> Cost:
    """weights: bytes of parameters, gradients and frozen weights."""
    from thalweg.torch.engines.temporaries import Stepped, count_temporaries

    explanation, stepped, state, moved, norms = optimizer.explain(), list[Stepped](), 0, 0, 0
    for row, treatment in zip(explanation.rows, optimizer._treatments(), strict=True):
        setting, held = treatment.setting, held_shape(row.shape, world)
        state += COUNTER_BYTES + count_state(setting, row.shape, row.dtype, world)
        moved += budget.bytes_moved(setting, row.shape, row.dtype, held)
        guard = setting.handling.guard
        norms = 0 if guard is None else 8 * math.prod(guard.kept_shape)  # one record for all parameters
        stepped.append(Stepped(row.shape if setting.rule.needs_whole else held, row.dtype, setting))
    rules: dict[str, tuple[int, int]] = {}
    for row in explanation.rows:
        tensors, parameters = rules.get(row.rule, (0, 0))
        rules[row.rule] = tensors + 1, parameters + math.prod(row.shape)
    temporaries = explanation.temporary_bytes
    if world > 1 or temporaries is None:
        temporaries = count_temporaries(stepped, optimizer._wanted_engine)
    total = weights + state + norms + temporaries
    return Cost(
        optimizer=name,
        rules=rules,
        state_bytes=state + norms,
        temporary_bytes=temporaries,
        moved_bytes=moved,
        floor_seconds=moved / bandwidth,
        total_bytes=total,
        fits=None if memory is None else total <= memory,
        explanation=explanation,
    )


def count_state(setting: Setting, shape: Shape, dtype: str, world: int) -> int:
    """Bytes of the state that a rank keeps for a parameter: like the parameter in shards, factors by rows."""
    factors, total = setting.rule_at(1).keys(shape, Factor), 0
    for key, (kept_shape, kept) in budget.state_entries(setting, shape, dtype, held_shape(shape, world)).items():
        total += budget.entry_bytes((held_shape(kept_shape, world) if key in factors else kept_shape, kept))
    return total
