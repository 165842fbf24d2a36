"""Ranks that were given different things: what each of them says."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from world_layouts import along, divided, mesh, quiet, torch

import thalweg.torch
from thalweg.errors import OptimError

Parameters = list[tuple[str, Any]]


def parameter(*shape: int, axis: int | None = 0, dtype: Any = torch.float64, grad: bool = True) -> Any:
    p = torch.nn.Parameter(along(axis)("", torch.ones(shape, dtype=dtype)))
    p.grad = torch.ones_like(p) if grad else None
    return p


def given(fault: str, odd: bool) -> tuple[str, Parameters, dict[str, Any]]:
    """A rule, parameters and options; those of the odd rank differ by a fault."""
    rule, options = "LAMB", dict(lr=0.1, weight_decay=0.1)
    params = [("first", parameter(8, 4)), ("second", parameter(6)), ("third", parameter(4, 4))]
    if fault == "rule of a mixture":
        return "Mixture", params, {"entries": [("*", (thalweg.torch.AdamW if odd else thalweg.torch.Kron).options())]}
    if not odd:
        return rule, params, options
    changes: Mapping[str, Callable[[], Any]] = {
        "shape": lambda: params.__setitem__(1, ("second", parameter(8))),
        "dtype": lambda: params.__setitem__(1, ("second", parameter(6, dtype=torch.float32))),
        "placement": lambda: params.__setitem__(2, ("third", parameter(4, 4, axis=1))),
        "name": lambda: params.__setitem__(1, ("other", params[1][1])),
        "one less": lambda: params.pop(),
        "one more": lambda: params.append(("fourth", parameter(4))),
        "order": lambda: params.reverse(),
        "gradient": lambda: params.__setitem__(1, ("second", parameter(6, grad=False))),
        "lr": lambda: options.update(lr=0.2),
        "option": lambda: options.update(trust=False),
        "guard": lambda: options.update(on_nonfinite="skip"),
        "overrides": lambda: options.update(overrides=[("sec*", dict(weight_decay=0.0))]),
        "rule": lambda: options.pop("weight_decay"),
    }
    changes[fault]()
    return "LARS" if fault == "rule" else rule, params, options


def words(step: Callable[[], Any]) -> str:
    """What a step says, "" if nothing."""
    try:
        step()
    except OptimError as error:
        return str(error)
    return ""


def disagreements(faults: Sequence[str], odd_rank: int = 1) -> dict[str, tuple[str, bool]]:
    """By fault what the first step says, and whether parameters and state are as they were."""
    found = {}
    for fault in faults:
        rule, params, options = given(fault, torch.distributed.get_rank() == odd_rank)
        optimizer = getattr(thalweg.torch, rule)(params, **options)
        said = words(optimizer.step)
        found[fault] = said, all(bool((p.to_local() == 1).all()) for _, p in params) and not optimizer.state
    return found


def disagreement_on_a_grid(odd_rank: int) -> str:
    """Parameters over rows and columns of ranks: most share no group with the odd one."""
    shape = (8, 6) if torch.distributed.get_rank() == odd_rank else (8, 4)
    params = []
    for name, axes in {"both": (0, 1), "rows": (0, None), "columns": (None, 1)}.items():
        p = torch.nn.Parameter(divided(torch.ones(shape), mesh(2, 2), *axes))
        p.grad = torch.ones_like(p)
        params.append((name, p))
    return words(thalweg.torch.LARS(params, 0.1).step)


def later_disagreement(fault: str) -> list[str]:
    """What steps say before and after ranks were changed differently."""
    odd = torch.distributed.get_rank() == 1
    _, params, _ = given("", False)
    optimizer = thalweg.torch.LAMB(params, lr=0.1)
    said, step = [words(optimizer.step)], optimizer.step
    if fault == "group":
        optimizer.add_param_group({"params": [("new", parameter(6 if odd else 4))]})
    elif fault == "loaded":
        saved = optimizer.state_dict()
        if odd:
            saved["param_groups"][0]["weight_decay"] = 0.5
        optimizer.load_state_dict(saved)
    elif fault == "option":  # both change their trust, and only one to what it should be
        optimizer.param_groups[0].update(trust=False, weight_decay=0.5 if odd else 0.25)
    elif fault == "gradients":  # both lose a gradient, but not the same
        dict(params)["first" if odd else "second"].grad = None
    elif fault == "cleared":
        optimizer.clear_state()
        optimizer.param_groups[0]["weight_decay"] = 0.5 if odd else 0.25
        step = functools.partial(optimizer.step_parameter, dict(params)["first"])
    return [*said, words(step)]


def parameters_of_its_own() -> str:
    """A rank may have plain parameters that others have not: nobody else is asked about them."""
    rank = torch.distributed.get_rank()
    own = torch.nn.Parameter(torch.ones(3 + rank))
    own.grad = torch.ones_like(own)
    params = [("shared", parameter(8, 4)), (f"expert {rank}", own)]
    return words(thalweg.torch.LAMB(params, lr=0.1).step)


def refusal_of_fsdp1(whole_names: bool) -> str:
    """What is said of the parameters of FullyShardedDataParallel, flat or as views of what is flat."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    with quiet():
        net = FullyShardedDataParallel(
            torch.nn.Linear(4, 4), device_id=torch.device("cpu"), use_orig_params=whole_names
        )
    return words(lambda: thalweg.torch.LAMB(net.named_parameters()))
