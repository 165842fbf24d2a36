"""Every option of the rules that have fused kernels, as parameters of a test."""

from __future__ import annotations

from typing import Any

import pytest
from side_by_side import FUSED_CASES

#: Besides those of the table: what it lacks, and what might interfere.
MORE: dict[str, dict[str, dict[str, Any]]] = {
    "LARS": {
        "nesterov with lr outside": dict(nesterov=True, momentum_mode="lr_outside", weight_decay=0.1),
        "timm": dict(variant="timm", weight_decay=0.1),
        "timm without decay": dict(variant="timm"),
        "larc": dict(variant="larc", weight_decay=0.1),
        "nesterov SGD": dict(trust=False, nesterov=True, weight_decay=0.1),
        "plain SGD": dict(trust=False, momentum=0.0, weight_decay=0.1),
        "LARC that clips": dict(clip=True, trust_coefficient=0.02, lr=0.001, weight_decay=0.1),
        "LARC combined": dict(clip=True, norm_mode="combined", weight_decay=0.1, eps=1e-3),
        "adapts only with decay, and has none": dict(always_adapt=False),
        "a number for zeros": dict(zero_ratio=0.25),
        "eps": dict(eps=0.5, weight_decay=0.1),
        "no step": dict(lr=0.0),
    },
    "LAMB": {
        "decoupled and bounded": dict(
            weight_decay=0.1, weight_decay_mode="decoupled", trust_clip=(0.5, 2.0), phi=(0.5, 4.0)
        ),
        "l2 without averaging": dict(weight_decay=0.1, weight_decay_mode="l2", grad_averaging=False),
        "AdamW decoupled": dict(trust=False, weight_decay=0.1, weight_decay_mode="decoupled"),
        "Adam with l2": dict(trust=False, weight_decay=0.1, weight_decay_mode="l2"),
        "adapts only with decay, and has one": dict(always_adapt=False, weight_decay=0.1),
        "phi that binds from below": dict(phi=(1000.0, 2000.0)),
        "phi that binds from above": dict(phi=(0.0, 1e-3)),
        "trust clip that binds": dict(trust_clip=(2.0, 3.0)),
        "no bias correction, l2, eps": dict(bias_correction=False, weight_decay=0.1, weight_decay_mode="l2", eps=0.1),
        "decay as large as p": dict(weight_decay=70.0, weight_decay_mode="decoupled"),
        "no eps": dict(eps=0.0, eps_root=1e-12),
    },
    "Adafactor": {
        "never factored": dict(factored=False, weight_decay=0.1),
        "unfactored with momentum": dict(factored=False, momentum=0.9, weight_decay=0.1),
        "unfactored clamp": dict(factored=False, eps=(0.5, 1e-3), eps_mode="clamp"),
        "clamp that binds": dict(min_dim_size_to_factor=2, eps=(0.7, 1e-3), eps_mode="clamp", momentum=0.5),
        "last two axes, clamp": dict(min_dim_size_to_factor=2, factor_dims="last2", eps=(0.1, 1e-3), eps_mode="clamp"),
        "momentum before lr, factored": dict(
            min_dim_size_to_factor=2, momentum=0.9, momentum_mode="before_lr", weight_decay=0.1
        ),
        "momentum of zero": dict(min_dim_size_to_factor=2, momentum=0.0),
        "tight clip": dict(min_dim_size_to_factor=2, clip_threshold=0.1),
        "large eps": dict(min_dim_size_to_factor=2, eps=(0.3, 5.0)),
        "paper": dict(variant="paper", lr=None),
        "warmup": dict(lr=None, warmup_init=True, min_dim_size_to_factor=2),
        "relative step under a cap": dict(relative_step=True, lr=0.6, min_dim_size_to_factor=2, weight_decay=0.1),
        "lr is None and not relative": dict(lr=None, relative_step=False, scale_parameter=False),
        "scaled beside relative steps only": dict(scale_parameter="relative", min_dim_size_to_factor=2),
        "decay by lr of a relative step": dict(
            lr=None, min_dim_size_to_factor=2, weight_decay=0.1, weight_decay_mode="lr"
        ),
        "independent decay, factored": dict(
            min_dim_size_to_factor=2, weight_decay=0.01, weight_decay_mode="independent", momentum=0.9
        ),
        "capped memory": dict(min_dim_size_to_factor=2, beta2_cap=0.3, decay_offset=2, beta2_decay=-0.5),
        "as in torch": dict(variant="torch", lr=0.05),
        "as in transformers": dict(variant="hf", lr=None),
        "as in optax": dict(variant="optax", min_dim_size_to_factor=2),
    },
}

TABLE = [
    pytest.param(case, options, id=f"{case.name}-{description}")
    for case in FUSED_CASES.values()
    for description, options in {**case.options, **MORE.get(case.name, {})}.items()
]
