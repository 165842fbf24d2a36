"""What optimizers cost on a model: each is built without memory, and what it says of its parameters is added up."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from thalweg.arrays import Shape
from thalweg.dtypes import DTYPES
from thalweg.errors import CommandError, OptionError, ParameterError
from thalweg.explain import Explanation
from thalweg.plan.load import load_model
from thalweg.plan.optimizers import MIXTURES, build_optimizer, find_optimizers, resolve_options
from thalweg.programs import budget
from thalweg.rules import RULES
from thalweg.rules.entries import Factor
from thalweg.settings import Setting
from thalweg.show.arguments import Given, parse_dtype

if TYPE_CHECKING:
    from torch import nn

    from thalweg.torch import Optimizer

#: Bytes a second of an H100's memory.
BANDWIDTH = 3.35e12
#: A count of steps is a tensor of float32 for each parameter.
COUNTER_BYTES = 4


@dataclass(frozen=True)
class Cost:
    """What one optimizer costs, in bytes; of several ranks, what the one with most costs."""

    optimizer: str
    #: How many numbers each of its rules steps.
    rules: Mapping[str, int]
    #: What is kept between steps, and what a step needs beside that, at most.
    state_bytes: int
    temporary_bytes: int
    #: What a step reads from memory and writes to it, at the least, and how many seconds that takes.
    moved_bytes: int
    floor_seconds: float
    #: Parameters, gradients, frozen weights, state and temporaries.
    total_bytes: int
    #: Whether that fits into the memory; None if no memory was named.
    fits: bool | None
    explanation: Explanation


@dataclass(frozen=True)
class Plan:
    """What each optimizer costs on a model, and what was asked."""

    model: str
    #: Of what is trained: how many numbers, in how many tensors, and their dtypes.
    parameters: int
    tensors: int
    dtypes: Sequence[str]
    frozen_parameters: int
    #: Gradients take as much as parameters.
    parameter_bytes: int
    frozen_bytes: int
    world: int
    bandwidth: float
    memory: int | None
    optimizers: Sequence[Cost]
    #: Optimizers that do not take this model, and why.
    refused: Mapping[str, str]

    def to_plain(self, *, explain: bool = False) -> dict[str, Any]:
        """All figures, for JSON. explain: every parameter too."""
        plain = asdict(self)
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

    model: what ``thalweg plan`` takes, or a module, which is not changed. optimizers: names, rules, or
    ``module:function`` for a mixture; all of the package if they are left out. dtype: of parameters and gradients.
    frozen: patterns of the names of parameters that are not trained, ``*.embed*``. world: ranks over which FSDP2
    shards. bandwidth: bytes a second of memory. memory: bytes that all should fit into.

    >>> [cost.state_bytes for cost in plan("gpt2", optimizers=["SGD", "Adafactor"]).optimizers]
    [497759824, 1287060]
    """
    for what, value in dict(world=world, bandwidth=bandwidth, memory=memory).items():
        if value is not None and not value > 0:
            raise CommandError(f"{what} must be above 0, got {value}")
    planned = find_optimizers([*RULES, *MIXTURES] if optimizers is None else optimizers)
    given, stored = resolve_options(options, planned), None if dtype is None else parse_dtype(dtype)
    name, module = (model, load_model(model, stored)) if isinstance(model, str) else (type(model).__name__, model)
    module = copy_module(name, module, stored, [frozen] if isinstance(frozen, str) else frozen)
    trained = [p for p in module.parameters() if p.requires_grad]
    untrained = [p for p in module.parameters() if not p.requires_grad]
    weights, frozen_bytes = (
        sum(math.prod(cut_shape(tuple(p.shape), world)) * p.element_size() for p in params)
        for params in (trained, untrained)
    )
    costs, refused = [], dict[str, str]()
    for candidate in planned:
        title = candidate.name
        try:
            optimizer = build_optimizer(candidate, module, given)
            costs.append(count_cost(title, optimizer, 2 * weights + frozen_bytes, world, bandwidth, memory))
        except ParameterError as error:
            refused[title] = str(error)
        except OptionError as error:
            raise CommandError(str(error) if str(error).startswith(title) else f"{title}: {error}") from None
    if not costs:
        raise CommandError("; ".join(f"{title}: {reason}" for title, reason in refused.items()))
    return Plan(
        model=name,
        parameters=sum(p.numel() for p in trained),
        tensors=len(trained),
        dtypes=sorted({str(p.dtype).removeprefix("torch.") for p in trained}),
        frozen_parameters=sum(p.numel() for p in untrained),
        parameter_bytes=weights,
        frozen_bytes=frozen_bytes,
        world=world,
        bandwidth=bandwidth,
        memory=memory,
        optimizers=costs,
        refused=refused,
    )


def copy_module(model: str, module: nn.Module, dtype: str | None, frozen: Sequence[str]) -> nn.Module:
    """A copy of a module without memory, in a dtype, with parameters frozen whose names match one of the patterns."""
    import torch

    named = list(module.named_parameters(remove_duplicate=False))
    for pattern in frozen:
        if not any(fnmatchcase(name, pattern) for name, _ in named):
            some = ", ".join(name for name, _ in named[:3])
            raise CommandError(f"--frozen {pattern} matches no parameter; the first ones are {some}")
    still = {id(p) for name, p in named for pattern in frozen if fnmatchcase(name, pattern)}
    copies: dict[int, Any] = {}
    for name, p in named:
        is_trained, can_be_trained = p.requires_grad and id(p) not in still, str(p.dtype)[len("torch.") :] in DTYPES
        if is_trained and not can_be_trained:
            raise CommandError(f"{model}: {name!r} has dtype {p.dtype}, which cannot be trained: add --frozen {name}")
        stored = getattr(torch, dtype) if dtype is not None and can_be_trained else p.dtype
        copies[id(p)] = torch.nn.Parameter(torch.empty(p.shape, dtype=stored, device="meta"), is_trained)
    if not any(p.requires_grad for p in copies.values()):
        raise CommandError(f"{model} has no floating-point parameter that requires a gradient")
    return copy.deepcopy(module, copies)  # what it is told of takes the place of what it would copy


def cut_shape(shape: Shape, world: int) -> Shape:
    """The most that a rank of FSDP2 has of a tensor: the first axis is cut into as many chunks as there are ranks."""
    return (-(-shape[0] // world), *shape[1:]) if shape else shape


def count_cost(name: str, optimizer: Optimizer, weights: int, world: int, bandwidth: float, memory: int | None) -> Cost:
    """The cost of one optimizer. weights: bytes of parameters, gradients and frozen weights."""
    explanation = optimizer.explain()
    rules = dict[str, int]()
    state = moved = norms = 0
    for row, treatment in zip(explanation.rows, optimizer._treatments(), strict=True):
        setting, held = treatment.setting, cut_shape(row.shape, world)
        state += COUNTER_BYTES + count_state(setting, row.shape, row.dtype, world)
        moved += budget.bytes_moved(setting, row.shape, row.dtype, held)
        if setting.handling.guard is not None:  # one record of norms, for all parameters
            norms = 8 * math.prod(setting.handling.guard.kept_shape)
        rules[row.rule] = rules.get(row.rule, 0) + math.prod(row.shape)
    temporaries = optimizer._count_temporaries(lambda p: cut_shape(tuple(p.shape), world))
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
    """Bytes of the state that a rank keeps for a parameter: shards like the parameter's, and some rows of factors."""
    factors, total = setting.rule_at(1).keys(shape, Factor), 0
    for key, (kept_shape, kept) in budget.state_entries(setting, shape, dtype, cut_shape(shape, world)).items():
        total += budget.entry_bytes((cut_shape(kept_shape, world) if key in factors else kept_shape, kept))
    return total
