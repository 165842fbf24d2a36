"""Mixtures as one optimizer, to be checked like any other."""

from __future__ import annotations

from typing import Any

from thalweg.torch import LAMB, Adafactor, AdamW, Kron, Mixture, Muon


def is_matrix(name: str, p: Any) -> bool:
    return bool(p.ndim == 2)


def is_vector(name: str, p: Any) -> bool:
    return bool(p.ndim < 2)


def muon_and_adamw(params: Any, lr: Any = 0.01, weight_decay: float = 0.0, **options: Any) -> Mixture:
    """Matrices by Muon, all else by AdamW, at one rate."""
    both = dict(lr=lr, weight_decay=weight_decay)
    return Mixture(params, [(is_matrix, Muon.options(**both)), ("*", AdamW.options(**both))], **options)


def adamw_and_adafactor(params: Any, lr: Any = 0.01, weight_decay: float = 0.0, **options: Any) -> Mixture:
    """Vectors by AdamW, all else by Adafactor, at one rate."""
    both = dict(lr=lr, weight_decay=weight_decay)
    return Mixture(params, [(is_vector, AdamW.options(**both)), ("*", Adafactor.options(**both))], **options)


def kron_and_others(params: Any, lr: Any = 0.01, **options: Any) -> Mixture:
    """Matrices by Kron, tensors of more axes by Adafactor, a vector by LAMB, all else by AdamW."""
    entries = [
        (is_matrix, Kron.options(lr=lr)),
        (lambda name, p: p.ndim > 2, Adafactor.options(lr=lr, min_dim_size_to_factor=2)),
        ("vector", LAMB.options(lr=lr)),
        ("*", AdamW.options(lr=lr)),
    ]
    return Mixture(params, entries, **options)
