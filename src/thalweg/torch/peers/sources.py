"""The optimizers whose runs can be continued: the rules that equal each, with which options, and its keys of state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thalweg.arrays import Shape
from thalweg.errors import StateError
from thalweg.rules import Annealed
from thalweg.torch.params.groups import Group
from thalweg.torch.peers.formats import UNTOLD, Peer, check_off

# ---- options that follow from several of theirs, or from the parameter


def torch_adafactor(g: Group, p: Tensor) -> dict[str, Any]:
    return {"eps": (torch.finfo(p.dtype).eps if g["eps"][0] is None else g["eps"][0], g["eps"][1])}


def timm_adafactor(g: Group, p: Tensor) -> dict[str, Any]:
    return {"eps": (g["eps"], g["eps_scale"]), "scale_parameter": "relative" if g["scale_parameter"] else False}


def big_vision(g: Group, p: Tensor) -> dict[str, Any]:
    eps = (1e-7 if p.dtype == torch.float16 else 1e-30) if g["eps"] is None else g["eps"]
    return {"eps": (eps, 1e-3), "weight_decay_mode": "independent" if g["unscaled_wd"] else "lr"}


def pytorch_optimizer_adafactor(g: Group, p: Tensor) -> dict[str, Any]:
    if g["weight_decay"]:
        check_off(g, weight_decouple=True)
    momentum, cap = g["betas"]
    mode = "independent" if g["fixed_decay"] else "alpha"
    return {"momentum": momentum, "beta2_cap": cap, "eps": (g["eps1"], g["eps2"]), "weight_decay_mode": mode}


def apex_lamb(g: Group, p: Tensor) -> dict[str, Any]:
    flags = {name: bool(g[name]) for name in ("bias_correction", "grad_averaging")}
    return {**flags, "max_grad_norm": g["max_grad_norm"] or None}


def timm_lamb(g: Group, p: Tensor) -> dict[str, Any]:
    mode = "decoupled" if g.get("decoupled_decay") else "in_update"
    clip = (0.0, 1.0) if g["trust_clip"] else None
    return {**apex_lamb(g, p), "weight_decay_mode": mode, "always_adapt": bool(g["always_adapt"]), "trust_clip": clip}


def pytorch_optimizer_lamb(g: Group, p: Tensor) -> dict[str, Any]:
    if g["weight_decay"]:
        check_off(g, fixed_decay=False)
    # without adam_debias lr is divided by 1 - betas[0]**step after the ratio: by 1, in the end
    if not g.get("adam_debias") and g["betas"][0] ** int(g.get("step", 0)) > 2.0**-24:
        raise StateError(
            "the source divides lr by 1 - betas[0]**step after its trust ratio, which has no counterpart here: only "
            "runs with adam_debias=True, or of so many steps that it makes no difference, can be continued"
        )
    trust = {"trust": False} if g["adam"] else {"phi": (0.0, 10.0)}
    return {**trust, "weight_decay_mode": "decoupled" if g["weight_decouple"] else "in_update"}


def kron_torch(g: Group, p: Tensor) -> dict[str, Any]:
    share = refreshes(g["preconditioner_update_probability"])
    whiten = "momentum" if g["momentum_into_precond_update"] else "gradient"
    decay = g["weight_decay"] if p.ndim > 1 else 0.0
    return {"weight_decay": decay, "whiten": whiten, "precond_update_probability": share}


def timm_kron(g: Group, p: Tensor) -> dict[str, Any]:
    mode = "decoupled" if g["decoupled_decay"] else "update"
    return {**kron_torch(g, p), "weight_decay": g["weight_decay"], "weight_decay_mode": mode}


def pytorch_optimizer_kron(g: Group, p: Tensor) -> dict[str, Any]:
    alike = {key.replace("pre_conditioner", "preconditioner").replace("precondition_", "precond_"): g[key] for key in g}
    return {**kron_torch(alike, p), "weight_decay_mode": "update" if g["weight_decouple"] else "gradient"}


def refreshes(share: Any) -> Any:
    """The share of steps that refresh factors, if a group tells it."""
    if share is None:
        return Annealed()
    if not callable(share):
        return float(share)
    numbers = [getattr(share, name, None) for name in ("max_prob", "min_prob", "decay", "flat_start")]
    if any(number is None for number in numbers):
        return UNTOLD
    # kron-torch keeps them in tensors of float32
    high, low, decay, flat = (float(f"{float(number):.6g}") for number in numbers if number is not None)
    return Annealed(high, low, decay, int(flat))


# ---- axes that are factored


def last_axes(g: Group, shape: Shape) -> tuple[int, int] | None:
    return (len(shape) - 2, len(shape) - 1) if len(shape) > 1 else None


def timm_axes(g: Group, shape: Shape) -> tuple[int, int] | None:
    for axes in ((0, 1), last_axes(g, shape)) if len(shape) > 2 else (last_axes(g, shape),):
        if axes and min(shape[axis] for axis in axes) > g["min_dim_size_to_factor"]:
            return axes
    return None


def largest_axes(g: Group, shape: Shape) -> tuple[int, int] | None:
    """First the axis that is kept with the rows: the second largest."""
    axes = sorted(range(len(shape)), key=lambda axis: (shape[axis], axis))[-2:]
    return (axes[0], axes[1]) if len(axes) == 2 and shape[axes[0]] >= g["min_dim_size_to_factor"] else None


# ---- the table

MOMENTUM = {"momentum_buffer": "momentum_buffer"}
MOMENTS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
LARGEST = {**MOMENTS, "max_exp_avg_sq": "max_exp_avg_sq"}
SQUARES = {"row_var": "row_var", "col_var": "col_var", "variance": "variance"}
ROWS = {"exp_avg_sq_row": "row_var", "exp_avg_sq_col": "col_var", "exp_avg_sq": "variance", "exp_avg": "exp_avg"}
SHORT_ROWS = {"exp_avg_sq_r": "row_var", "exp_avg_sq_c": "col_var", "exp_avg_sq": "variance", "exp_avg": "exp_avg"}
FACTORS = {"momentum_buffer": "momentum_buffer", "Q": "Q"}

CAUTION = {"caution": False, "corrected_weight_decay": False}
KRON = {"variant": "kron_torch"}

TABLE = (
    Peer(
        "torch.SGD",
        {"SGD": {}, "LARS": {"trust": False, "exempt": None, "momentum_mode": "lr_outside"}},
        same="momentum dampening weight_decay nesterov maximize",
        off={"dampening": 0},
        keys=MOMENTUM,
        counts="nowhere",
    ),
    *(
        Peer(
            f"torch.{name}",
            {"AdamW": {"decoupled": decoupled}, "LAMB": {"trust": False, "exempt": None, "weight_decay_mode": mode}},
            same="betas eps weight_decay amsgrad maximize",
            off={"amsgrad": False},
            where={"decoupled_weight_decay": decoupled},
            keys=LARGEST,
        )
        for name, decoupled, mode in (("Adam", False, "l2"), ("AdamW", True, "in_update"))
    ),
    Peer(
        "torch.Adafactor",
        {"Adafactor": {"variant": "torch"}},
        same="beta2_decay weight_decay maximize",
        renamed={"clip_threshold": "d"},
        others=torch_adafactor,
        reads="eps",
        keys=SQUARES,
        axes=last_axes,
    ),
    Peer(
        "torch.Muon",
        {"Muon": {"variant": "torch"}},
        same="momentum nesterov weight_decay ns_coefficients ns_steps eps",
        others=lambda g, p: {"scaling": g["adjust_lr_fn"] or "original"},
        reads="adjust_lr_fn",
        keys=MOMENTUM,
        counts="nowhere",
    ),
    Peer(
        "transformers.Adafactor",
        {"Adafactor": {"variant": "hf"}},
        same="eps clip_threshold weight_decay scale_parameter relative_step warmup_init",
        renamed={"beta2_decay": "decay_rate", "momentum": "beta1"},
        keys=ROWS,
        axes=last_axes,
    ),
    Peer(
        "timm.Adafactor",
        {"Adafactor": {}},
        same="clip_threshold weight_decay relative_step warmup_init",
        renamed={"beta2_decay": "decay_rate", "momentum": "beta1"},
        off={"caution": False},
        others=timm_adafactor,
        reads="eps eps_scale scale_parameter min_dim_size_to_factor",
        keys=ROWS,
        axes=timm_axes,
    ),
    Peer(
        "timm.AdafactorBigVision",
        {"Adafactor": {"variant": "big_vision"}},
        same="beta2_cap momentum weight_decay",
        renamed={"beta2_decay": "decay_rate", "clip_threshold": "clipping_threshold"},
        off=CAUTION,
        others=big_vision,
        reads="eps unscaled_wd min_dim_size_to_factor",
        keys=SHORT_ROWS,
        axes=largest_axes,
    ),
    Peer(
        "timm.Lamb",
        {"LAMB": {"exempt": None}},
        same="betas eps weight_decay",
        off=CAUTION,
        others=timm_lamb,
        reads="bias_correction grad_averaging max_grad_norm trust_clip always_adapt",
        keys=MOMENTS,
        counts="group",
    ),
    Peer(
        "timm.Lars",
        {"LARS": {"variant": "timm"}},
        same="momentum nesterov weight_decay eps always_adapt",
        renamed={"trust_coefficient": "trust_coeff"},
        off={"dampening": 0},
        others=lambda g, p: {"clip": bool(g["trust_clip"])},
        reads="dampening trust_clip",
        keys=MOMENTUM,
        counts="nowhere",
    ),
    Peer(
        "timm.Kron",
        {"Kron": {**KRON, "relative_damping": 0.0}},
        same="momentum precond_lr",
        renamed={"init_scale": "precond_init_scale"},
        off={"corrected_weight_decay": False, "stochastic_weight_decay": False},
        others=timm_kron,
        reads="weight_decay preconditioner_update_probability momentum_into_precond_update decoupled_decay flatten",
        keys=FACTORS,
    ),
    Peer(
        "timm.Lion",
        {"Lion": {}},
        same="betas weight_decay maximize",
        off=CAUTION,
        reads="caution corrected_weight_decay",
        where={"eps": None},  # which groups of timm's Adam variants have, and those of Lion have not
        keys={"exp_avg": "exp_avg"},
        counts="nowhere",
    ),
    Peer(
        "bitsandbytes.AdamW",
        {"AdamW": {"decoupled": True}},
        same="betas eps weight_decay",
        off={"alpha": 0.0},
        reads="alpha t_alpha t_beta3",
        keys={"state1": "exp_avg", "state2": "exp_avg_sq"},
    ),
    *(
        Peer(
            f"torchao.{name}8bit",
            {"AdamW": {"decoupled": decoupled}},
            same="betas eps weight_decay amsgrad",
            keys=LARGEST,
        )
        for name, decoupled in (("Adam", False), ("AdamW", True))
    ),
    Peer(
        "apex.FusedLAMB",
        {"LAMB": {"exempt": None, "weight_decay_mode": UNTOLD, "always_adapt": UNTOLD}},
        same="betas eps weight_decay",
        others=apex_lamb,
        reads="bias_correction grad_averaging max_grad_norm",
        keys=MOMENTS,
        counts="group",
    ),
    Peer(
        "kron_torch.Kron",
        {"Kron": KRON},
        same="precond_lr",
        renamed={"momentum": "b1", "init_scale": "precond_init_scale"},
        others=kron_torch,
        reads="weight_decay preconditioner_update_probability momentum_into_precond_update merge_dims",
        keys=FACTORS,
    ),
    Peer(
        "pytorch_optimizer.AdaFactor",
        {"Adafactor": {"variant": "hf", "beta2_decay": UNTOLD, "clip_threshold": UNTOLD, "maximize": UNTOLD}},
        same="weight_decay scale_parameter relative_step warmup_init",
        off={"ams_bound": False, "cautious": False},
        others=pytorch_optimizer_adafactor,
        reads="betas weight_decouple fixed_decay ams_bound eps1 eps2",
        keys=ROWS,
        counts="group",
        axes=last_axes,
    ),
    Peer(
        "pytorch_optimizer.Lamb",
        {"LAMB": {"exempt": None, "bias_correction": False, "max_grad_norm": UNTOLD, "maximize": UNTOLD}},
        same="betas eps weight_decay grad_averaging",
        off={"rectify": False, "adanorm": False},
        others=pytorch_optimizer_lamb,
        reads="weight_decouple fixed_decay rectify adam",
        keys=MOMENTS,
        counts="group",
    ),
    Peer(
        "pytorch_optimizer.LARS",
        {"LARS": {"exempt": "vectors", "momentum_mode": "lr_outside", "maximize": UNTOLD}},
        same="momentum nesterov weight_decay trust_coefficient",
        off={"dampening": 0},
        reads="dampening",
        keys=MOMENTUM,
        counts="group",
    ),
    Peer(
        "pytorch_optimizer.Kron",
        {"Kron": {**KRON, "relative_damping": 0.0, "maximize": UNTOLD}},
        same="momentum",
        renamed={"precond_lr": "precondition_lr", "init_scale": "precondition_init_scale"},
        others=pytorch_optimizer_kron,
        reads="weight_decay weight_decouple pre_conditioner_update_probability momentum_into_precondition_update",
        keys=FACTORS,
        counts="group",
    ),
    Peer(
        "pytorch_optimizer.SOAP",
        {"SOAP": {"maximize": UNTOLD}},
        same="betas shampoo_beta eps weight_decay precondition_frequency precondition_1d",
        renamed={"bias_correction": "correct_bias", "max_precond_dim": "max_precondition_dim"},
        off={"merge_dims": False, "normalize_gradient": False},
        reads="merge_dims normalize_gradient",
        keys={**MOMENTS, "GG": "GG", "Q": "Q"},
        counts="group",
    ),
)
#: By their names, as ``source=`` takes them.
PEERS: Mapping[str, Peer] = {peer.name: peer for peer in TABLE}
