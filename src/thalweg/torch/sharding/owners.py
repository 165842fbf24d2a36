"""Rules that need whole tensors, on sharded parameters: each tensor has an owner rank, which does the work.

Gradients travel to the owners in one message, what they made of them travels back in another. A rank keeps its part of
every factor, so that checkpoints can be laid out anew, and the whole factors of the tensors it owns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from thalweg.torch.sharding.owner_group import OwnerGroup
from thalweg.torch.sharding.owner_kernels import OwnerWhitening
from thalweg.torch.sharding.requests import Request, Whitened
from thalweg.torch.sharding.shards import MeshGroup


class Owners:
    """The groups of ranks over which one optimizer's parameters are sharded."""

    def __init__(self) -> None:
        self.groups: dict[tuple[MeshGroup, ...], OwnerGroup] = {}
        self.whitening = OwnerWhitening()

    def forget(self) -> None:
        """Drop whole factors, because state was loaded or dropped; the next step gathers them again."""
        for group in self.groups.values():
            group.known.clear()
            group.whole.clear()

    def whiten(self, requests: Sequence[Request]) -> list[Whitened]:
        """For each request this rank's shard of the whitened tensor, and this rank's rows of its factors."""
        together: dict[tuple[MeshGroup, ...], list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            # the same ranks, whichever axis of a parameter they shard
            together[tuple(sorted(request.part.across(None), key=lambda group: group.order))].append(index)
        answers: list[Any] = [None] * len(requests)
        for ranks, members in together.items():
            if ranks not in self.groups:
                self.groups[ranks] = OwnerGroup(ranks, self.whitening)
            found = self.groups[ranks].whiten([requests[i] for i in members])
            for i, answer in zip(members, found, strict=True):
                answers[i] = answer
        return answers
