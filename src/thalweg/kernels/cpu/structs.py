"""The structures of ``native/abi.h``, field by field."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int32, c_int64, c_uint8, c_uint32, c_void_p

RULES = {"LARS": 1, "LAMB": 2, "Adafactor": 3}
#: The rule of a call that only adds up squares of gradients.
SQUARES = 0
DTYPES = {"float32": 1, "float64": 2, "bfloat16": 3, "float16": 4}


class Tensor(ctypes.Structure):
    """Where one tensor lies, and how it is stored."""

    _fields_ = (
        ("p", c_void_p),
        ("g", c_void_p),
        ("state", c_void_p * 3),
        ("size", c_int64),
        ("seen_as", c_int64 * 5),
        ("position", c_int64),
        ("scratch", c_int64),
        ("options", c_int32),
        ("key", c_uint32),
        ("p_dtype", c_uint8),
        ("g_dtype", c_uint8),
        ("state_dtype", c_uint8 * 3),
        ("is_slice", c_uint8),
        ("unused", c_uint8 * 2),
    )


class Handling(ctypes.Structure):
    _fields_ = (
        ("gradient_scale", c_double),
        ("lr", c_double),
        ("weight_decay", c_double),
        ("t", c_uint32),
        ("stochastic", c_int32),
        ("guarded", c_int32),
        ("adapt", c_int32),
    )


class LarsOptions(ctypes.Structure):
    _fields_ = (
        ("handling", Handling),
        *((name, c_double) for name in ("momentum", "trust_coefficient", "eps", "zero_ratio")),
        *((name, c_int32) for name in ("combined", "lr_inside", "nesterov", "clip")),
    )


class LambOptions(ctypes.Structure):
    _fields_ = (
        ("handling", Handling),
        *((name, c_double) for name in ("b1", "gain1", "b2", "gain2", "correction1", "correction2")),
        *((name, c_double) for name in ("eps", "eps_root", "phi_low", "phi_high", "trust_low", "trust_high")),
        *((name, c_int32) for name in ("has_phi", "has_trust_clip", "decay_mode", "unused")),
    )


class AdafactorOptions(ctypes.Structure):
    _fields_ = (
        ("handling", Handling),
        *((name, c_double) for name in ("weight", "eps", "floor", "clip_threshold")),
        *((name, c_double) for name in ("rho", "nominal", "lr_scale", "momentum")),
        *((name, c_int32) for name in ("has_clip", "scaled", "clamp", "after_lr", "decay_mode", "unused")),
    )


class Outcome(ctypes.Structure):
    """What came of one tensor."""

    _fields_ = (("sums", c_double * 3), ("stats", c_double * 4), ("finite", c_int32), ("skip", c_int32))


#: In the order in which ``thalweg_sizeof`` counts them.
ALL: tuple[type[ctypes.Structure], ...] = (Tensor, LarsOptions, LambOptions, AdafactorOptions, Outcome)
