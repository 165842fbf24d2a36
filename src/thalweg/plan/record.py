"""A plan as plain values, for JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from thalweg.plan.optimizers import OPTIMIZERS, applies, is_mixture
from thalweg.plan.planning import Cost, Plan


def recorded(found: Plan, *, explain: bool = False) -> dict[str, Any]:
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
        "memory": found.memory,
        "optimizers": [recorded_cost(found, cost, explain) for cost in found.costs],
        "refused": dict(found.refused),
    }


def recorded_cost(found: Plan, cost: Cost, explain: bool) -> dict[str, Any]:
    share, name = cost.share, cost.optimizer
    rule, own = (None, {}) if is_mixture(name) else OPTIMIZERS[name]
    asked = [o for o in found.options if o.optimizer == name or (o.optimizer is None and applies(o, name))]
    record: dict[str, Any] = {
        "optimizer": name,
        "rule": rule,
        "rules": {
            each: {"tensors": len(some), "parameters": sum(tensor.elements for tensor in some)}
            for each, some in found.by_rule(cost).items()
        },
        "options": {**own, **{option.name: option.value for option in asked}},
        "engine": share.engine,
        "rank": share.rank,
        "parameter_bytes": share.parameter_bytes,
        "gradient_bytes": share.parameter_bytes,
        "frozen_bytes": share.frozen_bytes,
        "state_bytes": share.state_bytes,
        "host_bytes": share.host_bytes,
        "peak_bytes": share.peak_bytes,
        "peak_is_bound": share.peak_is_bound,
        "total_bytes": share.total_bytes if share.peak_bytes is not None else None,
        "fits": cost.fits,
        "moved_bytes": share.moved_bytes,
        "moved_bytes_without_refresh": share.moved_between,
        "product_flops": share.flops,
        "product_flops_without_refresh": share.flops_between,
        "seconds": cost.seconds,
        "seconds_without_refresh": cost.seconds_between,
        "sent_bytes": share.sent_bytes,
        "sent_bytes_without_refresh": share.sent_between,
        "collectives": share.collectives,
    }
    if explain:
        rows = found.explain(cost.optimizer)
        record["tensors"] = [asdict(row) for row in rows.rows]
    return record
