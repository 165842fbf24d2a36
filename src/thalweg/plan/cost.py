"""What optimizers cost on a model: each is built without memory, and what it says of its parameters is added up."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from thalweg.arrays import Shape
from thalweg.dtypes import DTYPES
from thalweg.errors import CommandError, OptionError, ParameterError
from thalweg.explain import Explanation
from thalweg.given import matches, unused_patterns
from thalweg.plan.models import load_model
from thalweg.plan.optimizers import MIXTURES, build_optimizer, find_optimizer, resolve_options
from thalweg.programs import budget
from thalweg.rules import RULES
from thalweg.rules.entries import Factor
from thalweg.show.arguments import Given, parse_dtype
from thalweg.show.extras import need

if TYPE_CHECKING:
    from torch import nn

    from thalweg.torch import Optimizer


@dataclass(frozen=True)
class Cost:
    """What one optimizer costs, in bytes; of several ranks, what the one with most costs."""

    optimizer: str
    #: Gradients take as much as parameters.
    parameter_bytes: int
    frozen_bytes: int
    #: What is kept between steps, and what a step needs beside that, at most.
    state_bytes: int
    temporary_bytes: int
    #: What a step reads from memory and writes to it, at the least.
    moved_bytes: int
    #: How each parameter is treated.
    explanation: Explanation

    @property
    def total_bytes(self) -> int:
        """Parameters, gradients, frozen weights, state and temporaries."""
        return 2 * self.parameter_bytes + self.frozen_bytes + self.state_bytes + self.temporary_bytes


@dataclass(frozen=True)
class Plan:
    """What optimizers cost on a model."""

    optimizers: Sequence[Cost]
    #: Optimizers that do not take this model, and why.
    refused: Mapping[str, str]


def plan(
    model: str | nn.Module,
    *,
    optimizers: Iterable[Any] = (*RULES, *MIXTURES),
    options: Iterable[Given] = (),
    dtype: str | None = None,
    frozen: Sequence[str] = (),
    world: int = 1,
) -> Plan:
    """What optimizers will cost on a model, before anything is allocated.

    model: what ``thalweg plan`` takes, or a module, which is not changed. optimizers: names, rules, or
    ``module:function`` for a mixture; all of the package if they are left out. dtype: of parameters and gradients.
    frozen: patterns of the names of parameters that are not trained, ``*.embed*``. world: ranks over which FSDP2
    shards.

    >>> [cost.state_bytes for cost in plan("gpt2", optimizers=["SGD", "Adafactor"]).optimizers]
    [497759824, 1287060]
    """
    need("torch", "torch")
    if world < 1:
        raise CommandError(f"world must be at least 1, got {world}")
    planned = list({candidate.name: candidate for candidate in map(find_optimizer, optimizers)}.values())
    given = resolve_options(options, planned)
    dtype = None if dtype is None else parse_dtype(dtype)
    name, module = (model, load_model(model)) if isinstance(model, str) else (type(model).__name__, model)
    module = copy_module(name, module, dtype, [frozen] if isinstance(frozen, str) else frozen)
    costs: list[Cost] = []
    refused: dict[str, str] = {}
    for candidate in planned:
        try:
            costs.append(count_cost(candidate.name, module, build_optimizer(candidate, module, given), world))
        except ParameterError as error:
            refused[candidate.name] = str(error)
        except OptionError as error:
            raise CommandError(f"{candidate.name}: {error}") from None
    if not costs:
        raise CommandError("; ".join(f"{optimizer}: {reason}" for optimizer, reason in refused.items()))
    return Plan(costs, refused)


def copy_module(name: str, module: nn.Module, dtype: str | None, frozen: Sequence[str]) -> nn.Module:
    """A copy of a module without memory, in a dtype, with parameters frozen whose names match one of the patterns."""
    import torch

    copies: dict[int, Any] = {}
    for p in module.parameters():
        copies[id(p)] = torch.nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), p.requires_grad)
    module = copy.deepcopy(module, copies)  # with parameters on the meta device in place of copies
    if dtype is not None:
        module = module.to(getattr(torch, dtype))
    named = list(module.named_parameters(remove_duplicate=False))
    for pattern in unused_patterns(frozen, named):
        examples = ", ".join(path for path, _ in named[:3])
        raise CommandError(f"--frozen {pattern} matches no parameter; the first ones are {examples}")
    for path, p in named:
        if any(matches(pattern, path, p) for pattern in frozen):
            p.requires_grad_(False)
    for path, p in named:
        if p.requires_grad and str(p.dtype).removeprefix("torch.") not in DTYPES:
            raise CommandError(
                f"{path!r} has dtype {p.dtype}, which cannot be trained: set --dtype, or --frozen {path}"
            )
    if not any(p.requires_grad for _, p in named):
        raise CommandError(f"{name} has no floating-point parameter that requires a gradient")
    return module


def cut_shape(shape: Shape, world: int) -> Shape:
    """The most that a rank of FSDP2 has of a tensor: the first axis is cut into as many chunks as there are ranks."""
    return (-(-shape[0] // world), *shape[1:]) if shape else shape


def count_cost(name: str, module: nn.Module, optimizer: Optimizer, world: int) -> Cost:
    """The cost of one optimizer of a module."""
    from thalweg.torch.params.explain import COUNTER_BYTES

    bytes_if_trained = {True: 0, False: 0}
    for p in module.parameters():
        bytes_if_trained[p.requires_grad] += math.prod(cut_shape(tuple(p.shape), world)) * p.element_size()
    explanation = optimizer.explain()
    state = moved = norms = 0
    for row, treatment in zip(explanation.rows, optimizer._treatments(), strict=True):
        setting, local_shape = treatment.setting, cut_shape(row.shape, world)
        factors = setting.rule_at(1).keys(row.shape, Factor)
        state += COUNTER_BYTES
        for key, (shape, dtype) in budget.state_entries(setting, row.shape, row.dtype, local_shape).items():
            state += budget.entry_bytes((cut_shape(shape, world) if key in factors else shape, dtype))
        moved += budget.bytes_moved(setting, row.shape, row.dtype, local_shape)
        if setting.numerics.guard is not None:  # one record of norms, for all parameters
            norms = 8 * math.prod(setting.numerics.guard.kept_shape)
    temporaries = optimizer._count_temporaries(lambda p: cut_shape(tuple(p.shape), world))
    return Cost(name, bytes_if_trained[True], bytes_if_trained[False], state + norms, temporaries, moved, explanation)
