"""Gradients added to float32 sums on a GPU, by one kernel for each dtype: the step of a rule that adds them to p."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thalweg.kernels.triton import served
from thalweg.rules import Rule, Update
from thalweg.settings import Handling
from thalweg.torch.engines.choice import are_for_kernels, is_dense
from thalweg.torch.engines.triton import on_device
from thalweg.torch.params.checks import NAMES


@dataclass(frozen=True, kw_only=True)
class Adding(Rule):
    def update(self, xp: Any, g: Any, s: Mapping[str, Any], p: Any, **_: Any) -> Update:
        return Update(g, {}, True, {})


class Sums:
    """Sums that gradients are added to, wherever these are. Both lie side by side in the same order."""

    def __init__(self, sums: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        from thalweg.kernels.triton.derived_tiles import passes_for
        from thalweg.kernels.triton.launching import Compiled
        from thalweg.kernels.triton.passes import Step
        from thalweg.kernels.triton.rows import Operand
        from thalweg.kernels.triton.uploads import Uploads

        self.device, self.step = sums[0].device, Step(0.0)
        none_taken = torch.zeros((), device=self.device)
        by_dtype: dict[torch.dtype, list[int]] = defaultdict(list)
        for i, g in enumerate(grads):
            by_dtype[g.dtype].append(i)
        #: With the places of their gradients.
        self.passes = [
            (
                passes_for(
                    [Operand(str(i), sums[i], (), none_taken) for i in own],
                    [grads[i] for i in own],
                    *(Adding(), Handling(), ()),
                    sharded=False,
                    uploads=Uploads(self.device),
                    compiled=Compiled(),
                    counted=False,
                ),
                own,
            )
            for own in by_dtype.values()
        ]

    def add(self, grads: Sequence[Tensor], addresses: array[int]) -> None:
        with on_device(self.device):
            for passes, own in self.passes:
                passes.tables.follow([grads[i] for i in own], array("Q", [addresses[i] for i in own]))
                passes.write(self.step)


def sums_by_kernels(sums: Sequence[Tensor], grads: Sequence[Tensor]) -> Sums | None:
    """What adds gradients to these; None if there are no kernels for all of them."""
    if not are_for_kernels([*sums, *grads]):
        return None
    alike = all(x.stride() == g.stride() and is_dense(x) for x, g in zip(sums, grads, strict=True))
    are_known = all(NAMES[g.dtype] in served.DTYPES for g in grads) and {x.dtype for x in sums} == {torch.float32}
    return Sums(sums, grads) if alike and are_known else None
