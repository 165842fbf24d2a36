"""How an optimizer will treat each parameter, shown before the first step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from thalweg.explain import Explanation, GroupRow, explain_parameter
from thalweg.kernels import triton
from thalweg.kernels.cpu.compiled import source_of as native_source
from thalweg.settings import ParameterOptions
from thalweg.spaces import torch as xp
from thalweg.torch.params.parameter import Param
from thalweg.torch.sharding.shards import local

#: A count of steps is a tensor of float32 for each parameter.
COUNTER_BYTES = 4


def explain(
    params: Sequence[Param],
    groups: Sequence[Mapping[str, Any]],
    shown_only: Sequence[bool],
    unused: tuple[Sequence[Any], Sequence[Any]],
    reason_undivided: Callable[..., str | None],
    *,
    temporary_bytes: int,
    code: bool,
) -> Explanation:
    """How parameters will be treated. A learning rate that is a tensor is not read: that would wait for it.

    shown_only: of each group, whether its lr is written by a scheduler for people to read, and not read by a step.
    unused: patterns of overrides, and of entries, that match no parameter. reason_undivided: why replicas do not divide
    the work on a parameter, "" if they do, None if there are none. temporary_bytes: what a step needs.
    """
    rows, sources = [], dict[str, str]()
    undivided: list[Counter[str | None]] = [Counter() for _ in groups]
    for name, p, index, setting, lr, factor, hints, _ in params:
        undivided[index][reason_undivided(p, setting, capturable=groups[index]["capturable"])] += 1
        row = explain_parameter(
            name,
            tuple(p.shape),
            xp.dtype(p),
            replace(setting, lr_scale=setting.lr_scale * factor),
            lr=lr,
            rms=rms_of(p),
            counter_bytes=COUNTER_BYTES,
            hints=hints,
        )
        rows.append(row)
        title = f"{row.rule}, {row.treatment}, {row.dtype} on {p.device.type}:"
        if code and title not in sources:
            sources[title] = source_of(setting, p, has_lr=lr is not None)
    shown = [
        explain_group(group, notes_on(group, is_shown, work), rule=group["rule"] if "entry" in group else "")
        for group, is_shown, work in zip(groups, shown_only, undivided, strict=True)
    ]
    return Explanation(rows, unused[0], shown, sources, unused[1], temporary_bytes)


def explain_group(group: Mapping[str, Any], notes: Iterator[str], *, rule: str) -> GroupRow:
    """A parameter group. rule: its name, in a mixture."""
    name, lr = group.get("name"), group["lr"]
    frozen = sum(not p.requires_grad for p in group["params"])
    shown = "a tensor" if isinstance(lr, Tensor) else f"{lr:g}" if isinstance(lr, (int, float)) else lr
    stepped = len(group["params"]) - frozen
    return GroupRow(None if name is None else str(name), stepped, frozen, shown, tuple(notes), rule)


def notes_on(group: Mapping[str, Any], shown_only: bool, undivided: Mapping[str | None, int]) -> Iterator[str]:
    """What a reader of a group should know."""
    for reason, count in undivided.items():
        if reason is not None:
            work = f"replicas {'do not ' if reason else ''}divide the work on {count} parameter{'s' * (count > 1)}"
            yield f"{work}: {reason}" if reason else work
    if shown_only:
        yield "a scheduler displays the step size as lr, and the rule computes it"
    elif group.get("lr_is_scale"):
        yield "lr multiplies the step size that the rule computes"
    if "lr_scale" in group:
        yield f"lr_scale {group['lr_scale']} is for a scheduler to multiply lr by"


def source_of(setting: ParameterOptions, p: Tensor, *, has_lr: bool) -> str:
    """The source of the fused code that steps such a parameter, or why there is none."""
    shape, dtype = tuple(p.shape), xp.dtype(p)
    if p.device.type in triton.DEVICES and triton.is_here():
        from thalweg.kernels.triton.explained import source_of

        return source_of(setting, shape, dtype, has_lr=has_lr)
    return native_source(setting, shape, dtype, has_lr=has_lr)


def rms_of(p: Tensor) -> float | None:
    """The root mean square of what this rank has of a parameter; 1 where there are no numbers yet."""
    held = local(p.detach())
    if not held.numel():
        return None
    return 1.0 if held.device.type == "meta" else float(held.float().square().mean().sqrt())
