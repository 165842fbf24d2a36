"""Options of other optimizers as options here: what makes a rule equal to each, read from one of its groups."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from thalweg.arrays import Shape
from thalweg.errors import StateError
from thalweg.rules import Annealed
from thalweg.torch.peers.formats import UNTOLD, Equal, Group, without

Options: TypeAlias = dict[str, Any]


def picked(group: Group, *names: str, **renamed: str) -> Options:
    """Options that have the same values there: by the same names, or by those that are given."""
    return {name: group[name] for name in names} | {ours: group[theirs] for ours, theirs in renamed.items()}


# ---- torch.optim


def sgd(g: Group, p: Tensor) -> Options:
    return picked(g, "momentum", "dampening", "weight_decay", "nesterov", "maximize")


def sgd_as_lars(g: Group, p: Tensor) -> Options:
    without(g, dampening=0)
    own = picked(g, "momentum", "weight_decay", "nesterov", "maximize")
    return {**own, "trust": False, "exempt": None, "momentum_mode": "lr_outside"}


def adam(*, decoupled: bool) -> Equal:
    return lambda g, p: {**picked(g, "betas", "eps", "weight_decay", "amsgrad", "maximize"), "decoupled": decoupled}


def adam_as_lamb(*, decoupled: bool) -> Equal:
    def equal(g: Group, p: Tensor) -> Options:
        without(g, amsgrad=False)
        mode = "in_update" if decoupled else "l2"
        own = picked(g, "betas", "eps", "weight_decay", "maximize")
        return {**own, "trust": False, "exempt": None, "weight_decay_mode": mode}

    return equal


def torchao_adam(*, decoupled: bool) -> Equal:
    return lambda g, p: {**picked(g, "betas", "eps", "weight_decay", "amsgrad"), "decoupled": decoupled}


def bitsandbytes_adam(g: Group, p: Tensor) -> Options:
    without(g, alpha=0.0)
    return {**picked(g, "betas", "eps", "weight_decay"), "decoupled": True}


def timm_lion(g: Group, p: Tensor) -> Options:
    without(g, caution=False, corrected_weight_decay=False)
    return picked(g, "betas", "weight_decay", "maximize")


def torch_adafactor(g: Group, p: Tensor) -> Options:
    own = picked(g, "beta2_decay", "weight_decay", "maximize", clip_threshold="d")
    floor = torch.finfo(p.dtype).eps if g["eps"][0] is None else g["eps"][0]
    return {"variant": "torch", **own, "eps": (floor, g["eps"][1])}


def torch_muon(g: Group, p: Tensor) -> Options:
    own = picked(g, "momentum", "nesterov", "weight_decay", "ns_coefficients", "ns_steps", "eps")
    return {"variant": "torch", **own, "scaling": g["adjust_lr_fn"] or "original"}


# ---- Adafactor


def hf_adafactor(g: Group, p: Tensor) -> Options:
    own = picked(g, "eps", "clip_threshold", "weight_decay", "scale_parameter", "relative_step", "warmup_init")
    return {"variant": "hf", **own, **picked(g, beta2_decay="decay_rate", momentum="beta1")}


def timm_adafactor(g: Group, p: Tensor) -> Options:
    without(g, caution=False)
    own = picked(g, "clip_threshold", "weight_decay", "relative_step", "warmup_init")
    own |= picked(g, beta2_decay="decay_rate", momentum="beta1")
    return {**own, "eps": (g["eps"], g["eps_scale"]), "scale_parameter": "relative" if g["scale_parameter"] else False}


def big_vision(g: Group, p: Tensor) -> Options:
    without(g, caution=False, corrected_weight_decay=False)
    own = picked(g, "beta2_cap", "momentum", "weight_decay", beta2_decay="decay_rate")
    own["clip_threshold"] = g["clipping_threshold"]
    eps = (1e-7 if p.dtype == torch.float16 else 1e-30) if g["eps"] is None else g["eps"]
    mode = "independent" if g["unscaled_wd"] else "lr"
    return {"variant": "big_vision", **own, "eps": (eps, 1e-3), "weight_decay_mode": mode}


def pytorch_optimizer_adafactor(g: Group, p: Tensor) -> Options:
    without(g, ams_bound=False, cautious=False)
    if g["weight_decay"]:
        without(g, weight_decouple=True)
    own = picked(g, "weight_decay", "scale_parameter", "relative_step", "warmup_init")
    own |= dict(zip(("momentum", "beta2_cap"), g["betas"], strict=True), eps=(g["eps1"], g["eps2"]))
    own["weight_decay_mode"] = "independent" if g["fixed_decay"] else "alpha"
    return {"variant": "hf", **own, "beta2_decay": UNTOLD, "clip_threshold": UNTOLD, "maximize": UNTOLD}


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


# ---- LAMB


def apex_lamb(g: Group, p: Tensor) -> Options:
    own = picked(g, "betas", "eps", "weight_decay")
    own |= {name: bool(g[name]) for name in ("bias_correction", "grad_averaging")}
    own["max_grad_norm"] = g["max_grad_norm"] or None
    return {**own, "exempt": None, "weight_decay_mode": UNTOLD, "always_adapt": UNTOLD}


def timm_lamb(g: Group, p: Tensor) -> Options:
    without(g, caution=False, corrected_weight_decay=False)
    mode = "decoupled" if g.get("decoupled_decay") else "in_update"
    clip = (0.0, 1.0) if g["trust_clip"] else None
    return {**apex_lamb(g, p), "weight_decay_mode": mode, "always_adapt": bool(g["always_adapt"]), "trust_clip": clip}


def pytorch_optimizer_lamb(g: Group, p: Tensor) -> Options:
    without(g, rectify=False, adanorm=False)
    if g["weight_decay"]:
        without(g, fixed_decay=False)
    # without adam_debias lr is divided by 1 - betas[0]**step after the ratio: by 1, in the end
    if not g.get("adam_debias") and g["betas"][0] ** int(g.get("step", 0)) > 2.0**-24:
        raise StateError(
            "the source divides lr by 1 - betas[0]**step after its trust ratio, which has no counterpart here: only "
            "runs with adam_debias=True, or of so many steps that it makes no difference, can be continued"
        )
    own = {**picked(g, "betas", "eps", "weight_decay", "grad_averaging"), "bias_correction": False}
    own |= {"exempt": None} | ({"trust": False} if g["adam"] else {"phi": (0.0, 10.0)})
    mode = "decoupled" if g["weight_decouple"] else "in_update"
    return {**own, "weight_decay_mode": mode, "max_grad_norm": UNTOLD, "maximize": UNTOLD}


# ---- LARS


def timm_lars(g: Group, p: Tensor) -> Options:
    without(g, dampening=0)
    own = picked(g, "momentum", "nesterov", "weight_decay", "eps", "always_adapt", trust_coefficient="trust_coeff")
    return {"variant": "timm", **own, "clip": bool(g["trust_clip"])}


def pytorch_optimizer_lars(g: Group, p: Tensor) -> Options:
    without(g, dampening=0)
    own = picked(g, "momentum", "nesterov", "weight_decay", "trust_coefficient")
    return {**own, "exempt": "vectors", "momentum_mode": "lr_outside", "maximize": UNTOLD}


# ---- Kron


def kron_torch(g: Group, p: Tensor) -> Options:
    return kron(g, "b1", decay=g["weight_decay"] if p.ndim > 1 else 0.0)


def timm_kron(g: Group, p: Tensor) -> Options:
    without(g, corrected_weight_decay=False, stochastic_weight_decay=False)
    own = kron(g, "momentum", decay=g["weight_decay"])
    return {**own, "weight_decay_mode": "decoupled" if g["decoupled_decay"] else "update", "relative_damping": 0.0}


def pytorch_optimizer_kron(g: Group, p: Tensor) -> Options:
    alike = {key.replace("pre_conditioner", "preconditioner").replace("precondition_", "precond_"): g[key] for key in g}
    own = kron(alike, "momentum", decay=g["weight_decay"] if p.ndim > 1 else 0.0)
    mode = "update" if g["weight_decouple"] else "gradient"
    return {**own, "weight_decay_mode": mode, "relative_damping": 0.0, "maximize": UNTOLD}


def kron(g: Group, momentum: str, decay: float) -> Options:
    own = picked(g, "precond_lr", momentum=momentum, init_scale="precond_init_scale")
    own["whiten"] = "momentum" if g["momentum_into_precond_update"] else "gradient"
    share = refreshes(g["preconditioner_update_probability"])
    return {"variant": "kron_torch", **own, "weight_decay": decay, "precond_update_probability": share}


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
