"""What is wrong around a step of torch: groups that miss parameters, tied ones apart, rates that stay, replicas."""

from __future__ import annotations

import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from thalweg.audit.page import Step
from thalweg.audit.report import told
from thalweg.audit.treated import Treated
from thalweg.dtypes import NARROW
from thalweg.torch.sharding.shards import count_ranks, local

#: How far shares of rates may be apart that follow one scheduler, by rounding.
ALIKE = 1e-6
#: How far from 1 a joint norm is that was clipped to 1, by what torch adds to it, and by rounding.
CLIPPED = 1e-4


def faults_of_groups(groups: Sequence[dict[str, Any]], model: nn.Module | None, steps: Sequence[Step]) -> Iterator[str]:
    """What groups have not, or have twice; and rates that do not follow."""
    homes = Counter(id(p) for group in groups for p in group["params"])
    named = [] if model is None else [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for words, names in {
        "in no group, and never stepped": [name for name, p in named if not homes[id(p)]],
        "in two groups, and stepped twice": [name for name, p in named if homes[id(p)] > 1],
        "requires a gradient and has none": [name for name, p in named if homes[id(p)] and p.grad is None],
    }.items():
        if names:
            yield f"{words}: {told(names)}"
    places: dict[Any, dict[int, int]] = defaultdict(dict)
    for index, p in ((index, p) for index, group in enumerate(groups) for p in group["params"]):
        if (held := local(p.detach())).numel():
            places[held.device, held.data_ptr()][id(p)] = index
    if tied := [[*indices.values()] for indices in places.values() if len(indices) > 1]:
        yield f"{len(tied)} tensors are stepped more than once: tied parameters in groups {tied[0]}"
    for i, one in enumerate(steps):
        for other in steps[:i]:
            is_tied = one.before.size > 1 and np.array_equal(one.before, other.before) and one.before.std() > 0
            if is_tied and not np.array_equal(one.after, other.after):
                yield f"{other.name} and {one.name} were equal, as if tied, and the step has set them apart"
    rates = {i: float(g["lr"]) / float(g["initial_lr"]) for i, g in enumerate(groups) if g.get("initial_lr")}
    usual = Counter(rates.values()).most_common(1)[0][0] if rates else 1.0
    for index in range(len(groups)):
        if abs(rates.get(index, 1.0) - usual) > ALIKE * usual:
            share = f"is {rates[index]:.4g} of its first" if index in rates else "follows no scheduler"
            yield f"the lr of group {index} {share}, and that of others is {usual:.4g} of its first"


def remarks_on(treated: Sequence[Treated], steps: Sequence[Step], joint: float) -> Iterator[str]:
    """What a reader should know that may be meant. joint: the norm of all gradients."""
    alike: dict[Any, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for step in steps:
        way = f"{type(step.rule).__name__}, lr {step.rate:g}, decay {step.decay:g}"
        if step.before.ndim > 1:
            alike[step.before.shape][way].append(step.name)
        empty = [key for key in step.state.keys() & step.state_dtypes.keys() if not step.state[key].any()]
        if empty and step.t > 1 and step.gradient.any() and step.before.size > 1:
            yield f"{step.name}: before step {step.t} its state {', '.join(sorted(empty))} is all zero"
    for ways in alike.values():
        usual, *others = sorted(ways, key=lambda way: -len(ways[way]))
        for way in others:
            yield f"stepped by {way}, others of their shape by {usual}: {told(ways[way])}"
    dtypes: dict[str, set[str]] = defaultdict(set)
    for one, step in zip(treated, steps, strict=True):
        kind = type(one.optimizer).__name__
        dtypes[kind] |= {*step.state_dtypes.values()}
        if one.is_guessed:
            yield f"{kind} is in no table: audited by the page of {type(step.rule).__name__}, its name"
        narrow = [key for key, dtype in step.state_dtypes.items() if dtype in NARROW and dtype != step.dtype]
        if narrow and not one.is_ours:
            yield f"{step.name}: its state {', '.join(narrow)} is in 16 bits, and it is in {step.dtype}"
    for kind, stored in dtypes.items():
        bits = re.search(r"(\d+) ?_?bit", kind)
        if bits and stored and not any("int" in dtype or bits[1] in dtype for dtype in stored):
            yield f"{kind} has {bits[1]} bits in its name, and keeps its state in {', '.join(sorted(stored))}"
    if abs(joint - 1) < CLIPPED:
        yield "the joint norm of gradients is 1.000: they were clipped to it before the step"


def replicas_apart(steps: Sequence[Step]) -> Iterator[str]:
    """Tensors that were equal on ranks before a step and are not after it, with the ranks that differ."""
    by_rank = told_by_ranks({s.name: [zlib.crc32(x.tobytes()) for x in (s.before, s.after)] for s in steps})
    for name in by_rank[0]:
        before, after = ([sums[name][i] for sums in by_rank if name in sums] for i in (0, 1))
        usual, _ = Counter(after).most_common(1)[0]
        if len(set(before)) == 1 and len(set(after)) > 1:
            ranks = [str(rank) for rank, number in enumerate(after) if number != usual]
            yield f"{name}: its replica on rank {', '.join(ranks)} differs from the others after the step"


def told_by_ranks(words: Any) -> list[Any]:
    """What each rank has to say."""
    gathered = [words] * count_ranks()
    if len(gathered) > 1:
        torch.distributed.all_gather_object(gathered, words)
    return gathered
