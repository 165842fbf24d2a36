"""A plan as plain values, for JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from thalweg.plan.optimizers import USUAL, applies
from thalweg.plan.planning import Cost, Plan
from thalweg.plan.shares import Share
from thalweg.show.registered import is_mixture

#: What fields of a share are called in a record, where it is not the same.
NAMES = {
    "moved_between": "moved_bytes_without_refresh",
    "flops": "product_flops",
    "flops_between": "product_flops_without_refresh",
    "sent_between": "sent_bytes_without_refresh",
    "received_between": "received_bytes_without_refresh",
    "divided": "divided_tensors",
}


def record_plan(found: Plan, *, explain: bool = False) -> dict[str, Any]:
    """Everything that a plan says; with ``explain`` every parameter too."""
    model = found.model
    return {
        "model": {
            "name": model.name,
            "about": model.about,
            "parameters": model.parameters,
            "tensors": len(model.tensors),
            "dtypes": sorted({tensor.dtype for tensor in model.tensors}),
            "frozen_parameters": sum(tensor.elements for tensor in model.frozen),
            "frozen_tensors": len(model.frozen),
            "frozen_dtypes": sorted({tensor.dtype for tensor in model.frozen}),
        },
        **asdict(found.place),
        "bandwidth": found.bandwidth,
        "flops": found.flops,
        "bus": found.bus,
        "forward_backward": found.forward_backward,
        "memory": found.memory,
        "optimizers": [record_cost(found, cost, explain) for cost in found.costs],
        "refused": dict(found.refused),
    }


def record_cost(found: Plan, cost: Cost, explain: bool) -> dict[str, Any]:
    share, name = cost.share, cost.optimizer
    asked = [o for o in found.options if o.owner == name or (not o.owner and applies(o, name))]
    record: dict[str, Any] = {
        "optimizer": name,
        "rule": None if is_mixture(name) else name,
        "rules": {
            each: {"tensors": len(some), "parameters": sum(tensor.elements for tensor in some)}
            for each, some in found.by_rule(cost).items()
        },
        "options": {**USUAL.get(name, {}), **{option.name: option.value for option in asked}},
        **record_share(share),
        "gradient_bytes": share.parameter_bytes,
        "total_bytes": share.total_bytes if share.peak_bytes is not None else None,
        "fits": cost.fits,
        "seconds": cost.seconds,
        "seconds_without_refresh": cost.seconds_between,
        "busiest": {**record_share(cost.busiest), "seconds": cost.busiest_seconds},
    }
    if explain:
        record["tensors"] = [asdict(row) for row in found.explain(cost.optimizer).rows]
    return record


def record_share(share: Share) -> dict[str, Any]:
    return {NAMES.get(name, name): value for name, value in asdict(share).items()}
