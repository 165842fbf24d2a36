"""What is wrong around a step of torch: groups that miss parameters, tied ones apart, rates that stay, replicas."""

from __future__ import annotations

import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from thalweg.audit.page import Step
from thalweg.audit.treated import Treated
from thalweg.dtypes import NARROW
from thalweg.torch.base import Optimizer
from thalweg.torch.sharding.shards import count_ranks, local

#: How many names are told.
MOST = 4
#: How far shares of rates may be apart that follow one scheduler, by rounding.
ALIKE = 1e-6


def told(names: Sequence[str]) -> str:
    return ", ".join(names[:MOST]) + (f" and {len(names) - MOST} more" if len(names) > MOST else "")


def faults_of_groups(
    optimizers: Sequence[torch.optim.Optimizer], model: nn.Module | None, steps: Sequence[Step]
) -> Iterator[str]:
    """What groups have not, or have twice; and rates that do not follow."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    homes = Counter(id(p) for group in groups for p in group["params"])
    named = {} if model is None else dict(model.named_parameters())
    for words, names in {
        "in no group, and never stepped": [n for n, p in named.items() if p.requires_grad and id(p) not in homes],
        "in two groups, and stepped twice": [n for n, p in named.items() if homes[id(p)] > 1],
        "requires a gradient and has none": [n for n, p in named.items() if id(p) in homes and lacks_gradient(p)],
    }.items():
        if names:
            yield f"{words}: {told(names)}"
    places = defaultdict(list)
    for index, p in ((index, p) for index, group in enumerate(groups) for p in group["params"]):
        if (held := local(p.detach())).numel():
            places[held.device, held.data_ptr()].append((index, p))
    if tied := [own for own in places.values() if len({id(p) for _, p in own}) > 1]:
        yield f"{len(tied)} tensors are stepped more than once: tied parameters in groups {[i for i, _ in tied[0]]}"
    for i, one in enumerate(steps):
        for other in steps[:i]:
            is_tied = one.before.shape == other.before.shape and one.before.size > 1 and one.before.std() > 0
            if is_tied and (one.before == other.before).all() and (one.after != other.after).any():
                yield f"{other.name} and {one.name} were equal, as if tied, and the step has set them apart"
    rates = {i: float(g["lr"]) / float(g["initial_lr"]) for i, g in enumerate(groups) if g.get("initial_lr")}
    usual = Counter(rates.values()).most_common(1)[0][0] if rates else 1.0
    for index in range(len(groups)):
        if index not in rates and usual != 1:
            yield f"the lr of group {index} follows no scheduler, and that of others is {usual:.4g} of its first"
        elif abs(rates.get(index, usual) - usual) > ALIKE * usual:
            yield f"the lr of group {index} is {rates[index]:.4g} of its first, and that of others {usual:.4g}"


def lacks_gradient(p: torch.Tensor) -> bool:
    return p.requires_grad and p.grad is None


def remarks_on(
    optimizers: Sequence[torch.optim.Optimizer], treated: Sequence[Treated], steps: Sequence[Step]
) -> list[str]:
    """What a reader should know that may be meant."""
    found = list[str]()
    alike: dict[Any, dict[Any, list[str]]] = defaultdict(lambda: defaultdict(list))
    for step in steps:
        if step.before.ndim > 1:
            way = type(step.rule).__name__, step.rate, getattr(step.rule, "weight_decay", 0.0)
            alike[step.before.shape][way].append(step.name)
        empty = [
            key for key, entry in step.state.items() if entry.size > 1 and not entry.any() and key in step.state_dtypes
        ]
        if empty and step.t > 1 and step.gradient.any():
            found.append(f"{step.name}: before step {step.t} its state {', '.join(empty)} is all zero")
    for ways in alike.values():
        (usual, _), *others = sorted(ways.items(), key=lambda item: -len(item[1]))
        for (rule, rate, decay), names in others:
            others_are = f"{usual[0]}, lr {usual[1]:g}, decay {usual[2]:g}"
            found.append(
                f"stepped by {rule}, lr {rate:g}, decay {decay:g}, others of their shape by {others_are}: {told(names)}"
            )
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        bits = re.search(r"(\d+) ?_?bit", kind)
        dtypes = {dtype for step in steps for dtype in step.state_dtypes.values()}
        if bits and not any("int" in dtype or str(bits[1]) in dtype for dtype in dtypes):
            found.append(f"{kind} has {bits[1]} bits in its name, and keeps its state in {', '.join(sorted(dtypes))}")
        pages = ", ".join(sorted({type(one.setting.rule).__name__ for one in treated if one.is_named}))
        if pages and not isinstance(optimizer, Optimizer):
            found.append(f"{kind} is in no table: its first step, by the page of {pages}, its name")
    for one, step in zip(treated, steps, strict=True):
        narrow = [key for key, dtype in step.state_dtypes.items() if dtype in NARROW and dtype != step.dtype]
        if narrow and one.peer is not None:
            found.append(f"{step.name}: its state {', '.join(narrow)} is in 16 bits, and it is in {step.dtype}")
        if one.peer is not None and one.peer.name == "torch.Adafactor" and step.dtype == "bfloat16":
            found.append("torch's Adafactor takes eps of the dtype, 0.0078 in bfloat16: smaller gradients hardly move")
    return list(dict.fromkeys(found))


def replicas_apart(steps: Sequence[Step]) -> list[str]:
    """Tensors that were equal on ranks before a step and are not after it, with the ranks that differ."""
    own = {step.name: (zlib.crc32(step.before.tobytes()), zlib.crc32(step.after.tobytes())) for step in steps}
    told, found = told_by_ranks(own), []
    for name in own:
        before, after = (Counter(each[name][i] for each in told if name in each) for i in (0, 1))
        if len(before) == 1 and len(after) > 1:
            usual = after.most_common(1)[0][0]
            ranks = [str(rank) for rank, each in enumerate(told) if each.get(name, (0, usual))[1] != usual]
            found.append(f"{name}: its replica on rank {', '.join(ranks)} differs from the others after the step")
    return found


def told_by_ranks(own: Any) -> list[Any]:
    """What each rank has to say."""
    if count_ranks() == 1:
        return [own]
    told: list[Any] = [None] * count_ranks()
    torch.distributed.all_gather_object(told, own)
    return told
