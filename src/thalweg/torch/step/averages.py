"""Parameters as they are to be evaluated: averages in their place for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from thalweg.boundary import seen
from thalweg.errors import OptionError
from thalweg.rules.around import NO_AVERAGE, Wrapped, keeps_average, keys_around
from thalweg.spaces import torch as xp
from thalweg.torch.sharding.shards import is_distributed, local


@contextmanager
def put_in_place(optimizer: Any, model: nn.Module | None = None) -> Iterator[None]:
    """Within: every parameter that has an average is that average, rounded to its dtype. No step can be taken.

    Others keep copies of weights, which are dropped at both ends: FSDP2 those that it has gathered, autocast its casts.
    model: what FSDP2 has sharded; None: found by what torch knows of this process.
    """
    if optimizer._is_evaluated:
        raise OptionError("averaged() is within averaged(): the averages are in place already")
    sharded = list(find_sharded_modules(optimizer, model))
    held: list[tuple[Tensor, Tensor]] = []
    try:
        with torch.no_grad():
            drop_copies(sharded)
            for p, value in find_averages(optimizer):
                weights = local(p.detach())
                held.append((p, weights.clone()))
                weights.copy_(value)
        optimizer._is_evaluated = True
        yield
    finally:
        optimizer._is_evaluated = False
        with torch.no_grad():
            drop_copies(sharded)
            for p, before in held:
                restore(p, before)


def restore(p: Tensor, before: Tensor) -> None:
    """Weights from before, in the dtype and on the device that the parameter has by now."""
    weights = local(p.detach())
    if weights.shape == before.shape:
        weights.copy_(before)
    else:  # it was replaced by something else, which goes
        p.data = before


def find_sharded_modules(optimizer: Any, model: nn.Module | None) -> Iterator[Any]:
    """The modules that may keep what FSDP2 has gathered of parameters."""
    if not any(map(is_distributed, optimizer.parameters())):
        return
    from torch.distributed.fsdp import FSDPModule

    if model is None:
        try:
            from torch.distributed._composable_state import _module_state_mapping as known
        except ImportError:
            raise OptionError(
                "this version of torch does not tell which modules FSDP2 has sharded: write averaged(model), and "
                "averaged_state_dict(model)"
            ) from None
        modules: list[Any] = list(known)
    else:
        modules = list(model.modules())
    yield from (module for module in modules if isinstance(module, FSDPModule))


def drop_copies(sharded: list[Any]) -> None:
    for module in sharded:
        module.reshard()
    torch.clear_autocast_cache()


def find_averages(optimizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """The parameters that have an average, with what they, or this rank's shards, are to be evaluated at."""
    groups = optimizer.param_groups
    settings = [optimizer._groups.check_settings(groups, index) for index in range(len(groups))]
    averaging = [(p, settings[index].of(name, p)[0]) for name, p, index in optimizer._homes()]
    averaging = [(p, setting) for p, setting in averaging if keeps_average(setting.rule)]
    if not averaging:
        raise OptionError(NO_AVERAGE)
    for p, setting in averaging:
        state = optimizer.state.get(p, {})
        step = int(state.get("step", 0))
        rule = cast(Wrapped, setting.rule_at(step + 1))
        if keys_around(rule, tuple(p.shape)) <= state.keys():  # before its first step it is its own average
            own = local(p.detach())
            entries = {key: local(entry).to(own.device) for key, entry in state.items() if key != "step"}
            yield p, rule.evaluate_at(xp, entries, seen(xp, own, entries), step)
