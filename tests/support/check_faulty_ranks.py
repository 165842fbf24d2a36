"""Faulty optimizers over ranks, each with one mistake that is seen in the wild, and the checks that must catch it.

Each fails on all ranks alike, so that one world serves them all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from check_faulty import (
    Adam,
    DecaysWithoutGradient,
    DecaysWithoutRate,
    GlobalRandomness,
    KeepsItsList,
    LosesOptions,
    StateElsewhere,
    StateForAll,
    WritesGradients,
)


def local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class KeepsItsRank(Adam):
    def one(self, group, p, g, s):
        super().one(group, p, g, s)
        s["rank"] = torch.tensor(dist.get_rank() if dist.is_initialized() else 0)


class SumsOverRanks(Adam):
    def direction(self, group, p, g, s):
        g = g.clone()
        if dist.is_initialized():
            dist.all_reduce(g)
        return g


class ReadsGradientsEarly(Adam):
    """As they are accumulated, which is before DDP has averaged them."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.seen = {}
        for p in self.param_groups[0]["params"]:
            p.register_post_accumulate_grad_hook(lambda p: self.seen.update({p: p.grad.clone()}))

    def one(self, group, p, g, s):
        super().one(group, p, self.seen.get(p, g), s)


class UsesLastGradient(Adam):
    """By reference: whoever fills it again changes what is remembered."""

    def one(self, group, p, g, s):
        last = s.pop("last", g)
        super().one(group, p, g - 0.5 * last, s)
        s["last"] = g


class LocalNorm(Adam):
    """Of the shard that a rank has, where that of the whole tensor is meant."""

    def write(self, p, lr, u):
        super().write(p, lr / (1 + float(local(u).norm())), u)


class WorldNorm(Adam):
    """Of the shards of all ranks, also where some have the same or belong to another model."""

    def before(self, params):
        total = sum(local(p.grad).square().sum() for p in params)
        if any(p is not local(p) for p in params):
            dist.all_reduce(total)
        self.share = float(total) / (1 + float(total))

    def write(self, p, lr, u):
        super().write(p, lr * self.share, u)


class NeedsShardsAlike(Adam):
    def before(self, params):
        if len({getattr(p, "placements", None) for p in params}) > 1:
            raise RuntimeError("some are sharded otherwise than others")


class OneRateForShards(Adam):
    def one(self, group, p, g, s):
        super().one(group if p is local(p) else {**group, "lr": self.param_groups[0]["lr"]}, p, g, s)


class MovesShards(Adam):
    def write(self, p, lr, u):
        if p is local(p):
            super().write(p, lr, u)
        else:
            p._local_tensor = p._local_tensor - lr * local(u)


class GathersState(Adam):
    def one(self, group, p, g, s):
        s.pop("whole", None)
        super().one(group, p, g, s)
        s["whole"] = g if g is local(g) else g.full_tensor()


class LocalState(Adam):
    """Shards of state as plain tensors, of which checkpoints do not know whose part they are."""

    def write(self, p, lr, u):
        local(p).sub_(lr * u)

    def one(self, group, p, g, s):
        super().one(group, p if p is local(p) else local(p.detach()), local(g), s)


class SendsMoreAndMore(Adam):
    def one(self, group, p, g, s):
        super().one(group, p, g, s)
        for _ in range(int(s["t"]) if dist.is_initialized() else 0):
            dist.all_reduce(torch.zeros(1))


class SaysItIsQuiet(Adam):
    check_facts = {"collectives": 2}  # noqa: RUF012

    def write(self, p, lr, u):
        size = u.norm()
        super().write(p, lr, u / (size.full_tensor() if hasattr(size, "full_tensor") else size))


class StepsWhereThereAreRows(Adam):
    """Others wait for this rank's message for ever."""

    def before(self, params):
        if all(local(p).numel() for p in params) and any(p is not local(p) for p in params):
            dist.all_reduce(torch.zeros(1))
        elif any(p is not local(p) for p in params):
            raise RuntimeError("this rank has nothing to do")


#: The faulty optimizer that each check must catch.
RANK_FAULTS: dict[str, Any] = {
    "replicas-stay-together": GlobalRandomness,
    "replicas-have-the-same-state": KeepsItsRank,
    "replicas-resume": StateElsewhere,
    "replicas-send-nothing": SumsOverRanks,
    "ddp-equals-one-process": ReadsGradientsEarly,
    "ddp-with-bucket-views": UsesLastGradient,
    "fsdp2": LocalNorm,
    "tensor-parallel": LocalNorm,
    "fsdp2-and-tensor-parallel": LocalNorm,
    "shards-of-rows": LocalNorm,
    "shards-with-different-seeds": GlobalRandomness,
    "shards-of-columns": LocalNorm,
    "uneven-shards": LocalNorm,
    "empty-shards": LocalNorm,
    "replicated-dtensors": WorldNorm,
    "replicated-shards": WorldNorm,
    "shards-of-rows-and-columns": LocalNorm,
    "shards-of-shards": LocalNorm,
    "stages": WorldNorm,
    "plain-tensors-among-shards": NeedsShardsAlike,
    "different-placements": NeedsShardsAlike,
    "shards-without-gradients": DecaysWithoutGradient,
    "groups-of-shards": OneRateForShards,
    "added-group-of-shards": KeepsItsList,
    "lr-zero-for-shards": DecaysWithoutRate,
    "gradients-of-shards-untouched": WritesGradients,
    "nan-in-one-shard": WorldNorm,
    "shards-stay-in-place": MovesShards,
    "state-is-sharded": GathersState,
    "messages-do-not-grow": SendsMoreAndMore,
    "collectives": SaysItIsQuiet,
    "files-at-the-same-size": StateElsewhere,
    "files-at-fewer-ranks": LocalState,
    "files-at-more-ranks": LocalState,
    "files-on-another-mesh": LocalState,
    "files-of-uneven-shards": LocalState,
    "gathered-by-one-process": LocalState,
    "spread-from-one-process": LocalState,
    "state-dict-of-each-rank": StateElsewhere,
    "flattened-state": StateForAll,
    "options-of-sharded-groups-come-back": LosesOptions,
}
