"""What native code is told of a rule, a step and the handling around them.

Numbers that depend on the step are computed by the rules themselves, in double precision.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from thalweg.kernels.cpu import structs
from thalweg.kernels.shown import Reads
from thalweg.rules import LAMB, LARS, Adafactor, Rule
from thalweg.rules.blocks import one_minus_power
from thalweg.settings import Handling
from thalweg.spaces import numbers


def handled(rule: Any, handling: Handling, t: int, rate: float, grad_scale: float | None, adapt: bool) -> Any:
    scale = 1.0 if grad_scale is None else grad_scale
    return structs.Handling(
        gradient_scale=-scale if handling.maximize else scale,
        lr=rate,
        weight_decay=rule.weight_decay,
        t=t & 0xFFFFFFFF,
        stochastic=handling.rounding == "stochastic",
        guarded=handling.on_nonfinite != "propagate",
        adapt=adapt,
    )


def adapts(rule: LARS | LAMB) -> bool:
    return bool(rule.trust and (rule.always_adapt or rule.weight_decay != 0))


def lars(
    rule: LARS, handling: Handling, t: int, lr: float | None, lr_scale: float, grad_scale: float | None
) -> structs.LarsOptions:
    assert lr is not None
    return structs.LarsOptions(
        handling=handled(rule, handling, t, lr * lr_scale, grad_scale, adapts(rule)),
        momentum=rule.momentum,
        trust_coefficient=rule.trust_coefficient,
        eps=rule.eps,
        zero_ratio=rule.trust_coefficient if isinstance(rule.zero_ratio, str) else rule.zero_ratio,
        combined=rule.norm_mode == "combined",
        lr_inside=rule.momentum_mode == "lr_inside",
        nesterov=rule.nesterov,
        clip=rule.clip,
    )


def lamb(
    rule: LAMB, handling: Handling, t: int, lr: float | None, lr_scale: float, grad_scale: float | None
) -> structs.LambOptions:
    assert lr is not None
    xp: Any = numbers
    b1, b2 = rule.betas
    corrected = rule.bias_correction
    phi, trust_clip = rule.phi or (0.0, 0.0), rule.trust_clip or (0.0, 0.0)
    return structs.LambOptions(
        handling=handled(rule, handling, t, lr * lr_scale, grad_scale, adapts(rule)),
        b1=b1,
        gain1=1 - b1 if rule.grad_averaging else 1.0,
        b2=b2,
        gain2=1 - b2,
        correction1=one_minus_power(xp, b1, t) if corrected else 1.0,
        correction2=one_minus_power(xp, b2, t) if corrected else 1.0,
        eps=rule.eps,
        eps_root=rule.eps_root,
        phi_low=phi[0],
        phi_high=phi[1],
        trust_low=trust_clip[0],
        trust_high=trust_clip[1],
        has_phi=rule.phi is not None,
        has_trust_clip=rule.trust_clip is not None,
        decay_mode=("in_update", "decoupled", "l2").index(rule.weight_decay_mode),
    )


def adafactor(
    rule: Adafactor, handling: Handling, t: int, lr: float | None, lr_scale: float, grad_scale: float | None
) -> structs.AdafactorOptions:
    xp: Any = numbers
    nominal, rho = rule.rates(xp, t, lr)
    return structs.AdafactorOptions(
        handling=handled(rule, handling, t, 0.0, grad_scale, False),
        weight=rule.weight_of_squares(xp, t),
        eps=rule.eps[0],
        floor=rule.eps[1],
        clip_threshold=1.0 if rule.clip_threshold is None else rule.clip_threshold,
        rho=rho,
        nominal=nominal * lr_scale,
        lr_scale=lr_scale,
        momentum=0.0 if rule.momentum is None else rule.momentum,
        has_clip=rule.clip_threshold is not None,
        scaled=rule.is_scaled(lr),
        clamp=rule.eps_mode == "clamp",
        after_lr=rule.momentum_mode == "after_lr",
        decay_mode=("alpha", "lr", "independent").index(rule.weight_decay_mode),
    )


#: The options that native code reads, by itself or through the rule's own methods.
READS: Reads = {
    LARS: (
        "momentum weight_decay trust_coefficient eps nesterov trust always_adapt norm_mode momentum_mode clip "
        "zero_ratio stacked_axes"
    ),
    LAMB: (
        "betas eps weight_decay bias_correction grad_averaging trust always_adapt trust_clip phi eps_root "
        "weight_decay_mode stacked_axes"
    ),
    Adafactor: (
        "beta2_decay eps clip_threshold weight_decay relative_step warmup_init scale_parameter momentum momentum_mode "
        "weight_decay_mode decay_offset beta2_cap eps_mode factored min_dim_size_to_factor factor_dims only_2d "
        "stacked_axes"
    ),
}
#: The function that translates each rule.
TRANSLATED: dict[type[Rule], Callable[..., ctypes.Structure]] = {LARS: lars, LAMB: lamb, Adafactor: adafactor}

#: The figures of ``Outcome.stats``, in their order.
STATS = {
    "LARS": ("trust_ratio", "param_norm", "grad_norm"),
    "LAMB": ("trust_ratio", "param_norm", "update_norm", "grad_norm"),
    "Adafactor": ("update_rms", "clip_factor", "param_rms", "step_size"),
}
