"""Parameters as they are to be evaluated: averages in their place for a while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from thalweg.boundary import seen
from thalweg.errors import OptionError, StateError, warn
from thalweg.rules.around import NO_AVERAGE, Wrapped, keeps_average, keys_around
from thalweg.settings import ParameterOptions
from thalweg.spaces import torch as xp
from thalweg.storage import WEIGHTS
from thalweg.torch.engines.protocol import Bucket
from thalweg.torch.params.groups import EVALUATED_LAYOUT
from thalweg.torch.private import sharded_modules
from thalweg.torch.sharding.shards import is_distributed, local


@contextmanager
def averages_in_place(optimizer: Any, model: nn.Module | None = None) -> Iterator[None]:
    """Within: as after :func:`put_in_place`. Afterwards as it was before."""
    if not find_averaging(optimizer):
        raise OptionError(NO_AVERAGE)
    was_evaluated = optimizer._is_evaluated
    put_in_place(optimizer, model)
    try:
        yield
    finally:
        if not was_evaluated:
            take_out(optimizer, model)


def put_in_place(optimizer: Any, model: nn.Module | None = None) -> None:
    """Make every parameter that has an average that average, rounded to its dtype. No step can be taken then.

    The weights go to the state of their parameter: saved, loaded and copied with it, they are there to be put back.
    Others keep copies of weights, which are dropped: FSDP2 those that it has gathered, autocast its casts.
    model: what FSDP2 has sharded; None: found by what torch knows of this process.
    """
    averaging = find_averaging(optimizer)
    if optimizer._is_evaluated or not averaging:
        return
    drop_copies(optimizer, model)
    optimizer._is_evaluated = True
    try:
        with torch.no_grad():
            for p, setting in averaging:
                state = optimizer.state.get(p, {})
                value = evaluate(p, setting, state)
                if value is not None:
                    state[WEIGHTS] = p.detach().clone()
                    local(p.detach()).copy_(value)
    except BaseException:
        take_out(optimizer, model)
        raise


def take_out(optimizer: Any, model: nn.Module | None = None) -> None:
    """Put the weights back, in the dtype and on the device that their parameters have by now."""
    if not optimizer._is_evaluated:
        return
    drop_copies(optimizer, model)
    with torch.no_grad():
        for p, state in optimizer.state.items():
            if WEIGHTS in state:
                restore(p, local(state.pop(WEIGHTS)))
    optimizer._is_evaluated = False


def restore(p: Tensor, before: Tensor) -> None:
    weights = local(p.detach())
    if weights.shape == before.shape:
        weights.copy_(before)
    else:  # it was replaced by something else, which goes
        p.data = before


def have_weights(states: Mapping[Tensor, Mapping[str, Any]]) -> bool:
    """Whether averages are in the place of parameters that have these states."""
    return any(WEIGHTS in state for state in states.values())


def check_loaded(
    groups: list[dict[str, Any]],
    loaded: Mapping[Tensor, Mapping[str, Any]],
    present: Mapping[Tensor, Mapping[str, Any]],
) -> None:
    """Refuse a saved state without weights whose place averages have taken, in the saved run or in this one.

    groups: the saved ones. loaded: what was read of each parameter. present: what is there now.
    """
    if any(group.get("layout") == EVALUATED_LAYOUT for group in groups) and not have_weights(loaded):
        raise StateError(
            "this state was saved in eval mode, and the weights that averages had taken the place of are missing: "
            "loaders that read what a new state_dict() asks for leave them out; call make_state() and eval() before "
            "they ask, or save after train()"
        )
    if any(WEIGHTS in state and WEIGHTS not in loaded.get(p, {}) for p, state in present.items()):
        raise StateError(
            "this optimizer is in eval mode, and its weights would be lost: call train(), or leave averaged(), before "
            "the model and this state are loaded"
        )


def drop_copies(optimizer: Any, model: nn.Module | None) -> None:
    for module in list(find_sharded_modules(optimizer, model)):
        module.reshard()
    torch.clear_autocast_cache()


def find_sharded_modules(optimizer: Any, model: nn.Module | None) -> Iterator[Any]:
    """The modules that may keep what FSDP2 has gathered of parameters."""
    if not any(map(is_distributed, optimizer.parameters())):
        return
    from torch.distributed.fsdp import FSDPModule

    if model is None:
        known = sharded_modules()
        if known is None:
            raise OptionError(
                "this version of torch does not tell which modules FSDP2 has sharded: write averaged(model), "
                "eval(model), train(model) and averaged_state_dict(model)"
            )
        modules: list[Any] = list(known)
    else:
        modules = list(model.modules())
    yield from (module for module in modules if isinstance(module, FSDPModule))


def find_averaging(optimizer: Any) -> list[tuple[Tensor, ParameterOptions]]:
    """The parameters that are to have an average, with what holds for them."""
    groups = optimizer.param_groups
    settings = [optimizer._groups.options_at(groups, index) for index in range(len(groups))]
    every = [(p, settings[index].choose(name, p)[0]) for name, p, index in optimizer._homes()]
    return [(p, setting) for p, setting in every if keeps_average(setting.rule)]


def evaluate(p: Tensor, setting: ParameterOptions, state: Mapping[str, Any]) -> Tensor | None:
    """What a parameter, or this rank's shard, is to be evaluated at; None: as it is, before its first step."""
    step = int(state.get("step", 0))
    rule = cast(Wrapped, setting.rule_at(step + 1))
    if not keys_around(rule, tuple(p.shape)) <= state.keys():
        return None
    held = local(p.detach())
    entries = {key: local(entry).to(held.device) for key, entry in state.items() if key != "step"}
    return cast(Tensor, rule.evaluate_at(xp, entries, seen(xp, held, entries), step))


class RateWatch:
    """Knows the rates that groups had at their first step, and warns of those that change under ``schedule_free``."""

    def __init__(self) -> None:
        self.rates: dict[int, Any] = {}
        self.is_told = False

    def check(self, buckets: Iterable[Bucket]) -> None:
        """Warn, once, of a rate that is not what it was. Those that are tensors are not read: that would wait."""
        for bucket in buckets:
            if (
                self.is_told
                or not getattr(bucket.setting.rule, "schedule_free", False)
                or isinstance(bucket.lr, Tensor)
            ):
                continue
            first = self.rates.setdefault(bucket.group, bucket.lr)
            if bucket.lr != first:
                self.is_told = True
                warn(
                    f"schedule_free takes the place of a schedule, and lr went from {first} to {bucket.lr}: all steps "
                    "weigh in its average as if lr were constant; leave it constant (lr_scheduler_type='constant' in "
                    "TrainingArguments), and use schedule_free_warmup for a warm-up"
                )
