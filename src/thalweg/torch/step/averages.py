"""Parameters as they are to be evaluated: averages in their place for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from thalweg.boundary import seen
from thalweg.errors import OptionError
from thalweg.rules.around import NO_AVERAGE, Wrapped, keeps_average, keys_around
from thalweg.spaces import torch as xp
from thalweg.torch.sharding.shards import local


@contextmanager
def put_in_place(optimizer: Any) -> Iterator[None]:
    """Within: every parameter that has an average is that average, rounded to its dtype. No step can be taken."""
    if optimizer._is_evaluated:
        raise OptionError("averaged() is within averaged(): the averages are in place already")
    held: list[tuple[Tensor, Tensor]] = []
    try:
        with torch.no_grad():
            for own, value in find_averages(optimizer):
                held.append((own, own.clone()))
                own.copy_(value)
        optimizer._is_evaluated = True
        yield
    finally:
        optimizer._is_evaluated = False
        with torch.no_grad():
            for own, before in held:
                own.copy_(before)


def find_averages(optimizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """The parameters that have an average, or this rank's shards of them, with what they are to be evaluated at."""
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
            yield own, rule.evaluate_at(xp, entries, seen(xp, own, entries), step)
