"""Rules that need whole tensors, on sharded parameters: each tensor has an owner rank, which does the work.

Gradients travel to the owners in one message, what they made of them travels back in another. A rank keeps its part of
every factor, so that checkpoints can be laid out anew, and the whole factors of the tensors it owns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from thalweg.arrays import State
from thalweg.rules import Kron, Update
from thalweg.spaces.foreach import PerTensor, TensorList
from thalweg.spaces.sharded import ReducedList, Sharded
from thalweg.torch.engines.bucket import Bucket
from thalweg.torch.sharding.owner_kernels import Whitener
from thalweg.torch.sharding.requests import Answer, Task
from thalweg.torch.sharding.shards import MeshGroup
from thalweg.torch.sharding.team import Team


class Owners:
    """The teams of ranks over which one optimizer's parameters are sharded."""

    def __init__(self) -> None:
        self.teams: dict[tuple[MeshGroup, ...], Team] = {}
        self.whitener = Whitener()

    def forget(self) -> None:
        """Drop whole factors, because state was loaded or dropped; the next step gathers them again."""
        for team in self.teams.values():
            team.known.clear()
            team.whole.clear()

    def whitened(self, tasks: Sequence[Task]) -> list[Answer]:
        """For each task this rank's shard of the whitened tensor, the mean of its squares, and rows of its factors."""
        by_team: dict[tuple[MeshGroup, ...], list[int]] = defaultdict(list)
        for index, task in enumerate(tasks):
            # the same ranks, whichever axis of a parameter they shard
            by_team[tuple(sorted(task.part.across(None), key=lambda group: group.order))].append(index)
        answers: list[Any] = [None] * len(tasks)
        for groups, members in by_team.items():
            if groups not in self.teams:
                self.teams[groups] = Team(groups, self.whitener)
            found = self.teams[groups].whitened([tasks[i] for i in members])
            for i, answer in zip(members, found, strict=True):
                answers[i] = answer
        return answers


class Owned:
    """A rule that needs whole tensors, as the boundary sees it: its middle part is done by the owners."""

    def __init__(self, rule: Kron, bucket: Bucket, *, by_kernels: bool) -> None:
        self.rule, self.bucket, self.by_kernels = rule, bucket, by_kernels
        self.entries = rule.entries

    def update(
        self,
        xp: Sharded,
        g: TensorList,
        s: State[TensorList],
        p: TensorList,
        *,
        t: Any,
        lr: Any,
        lr_scale: Any,
        noise: Callable[[], Any],
    ) -> Update:
        x, y, due, state = self.rule.shown(xp, g, s, p, t)
        keys = [key for key in s if key.startswith(("Q_", "L_"))]
        bucket, handling = self.bucket, self.bucket.setting.handling
        numbers = t.values.unbind() if isinstance(t, PerTensor) else [t] * len(bucket.names)
        if self.by_kernels and isinstance(t, PerTensor):  # the host has to know
            numbers = [round(number) for number in t.values.tolist()]
        refreshed = torch.stack(list(due.tensors)).tolist()
        tasks = [
            Task(
                name=name,
                rule=self.rule,
                part=bucket.parts[i],
                shown=[x.tensors[i]] if x is y else [x.tensors[i], y.tensors[i]],
                factors={key: s[key].tensors[i] for key in keys},
                stored=bucket.states[i]["Q_0"].dtype,
                # a skipped step would leave the owner with factors that differ from the state of the other ranks
                remembered=handling.on_nonfinite == "propagate" and bucket.allowed is None,
                by_kernels=self.by_kernels,
                due=refreshed[i],
                seed=handling.seed,
                t=numbers[i],
            )
            for i, name in enumerate(bucket.names)
        ]
        answers = xp.exchange.whitened(tasks)  # type: ignore[attr-defined]
        h = TensorList([answer[0] for answer in answers])
        h_square = ReducedList([answer[1] for answer in answers], tuple(range(len(bucket.parts[0].shape))))
        factors = {key: TensorList([answer[2][key] for answer in answers]) for key in keys}
        return self.rule.taken(xp, h, h_square, s, p, {**state, **factors}, due, lr * lr_scale)
