"""What the optimizers are called with: names of optax, names of ours, and where both are shown."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from thalweg.errors import OptionError
from thalweg.given import check_known
from thalweg.optax import options as typed
from thalweg.optax.transformation import stacks
from thalweg.optax.values import dtype_name
from thalweg.options import defaults, shown
from thalweg.overrides import is_list
from thalweg.rules import Rule

F = TypeVar("F", bound=Callable[..., Any])

#: What optax calls options of ours.
OPTAX: dict[str, dict[str, str]] = {
    "LAMB": {"betas[0]": "b1", "betas[1]": "b2"},
    "Adafactor": {
        "beta2_decay": "decay_rate",
        "scale_parameter": "multiply_by_parameter_scale",
        "clip_threshold": "clipping_threshold",
        "weight_decay": "weight_decay_rate",
        "momentum_dtype": "dtype_momentum",
        "eps[0]": "eps",
        "eps[1]": "min_scale",
    },
    "Muon": {
        "ns_coefficients": "ns_coeffs",
        "momentum": "beta",
        "momentum_dtype": "mu_dtype",
        "rms": "consistent_rms",
    },
}
#: What psgd-jax calls options of ours.
PSGD_JAX = {
    "b1": "momentum",
    "preconditioner_lr": "precond_lr",
    "preconditioner_update_probability": "precond_update_probability",
    "preconditioner_init_scale": "init_scale",
    "max_size_triangular": "max_size_dense",
    "mu_dtype": "momentum_dtype",
    "scanned_layers": "stacked_axes",
}


#: The names of all options that an optimizer shows, filled as it is defined.
SHOWN: dict[type[Rule], list[str]] = {}


def extra_names(rule: type[Rule]) -> list[str]:
    """The options that an optimizer takes beside its explicit ones."""
    return list(getattr(typed, f"{rule.__name__.capitalize()}Extras").__annotations__)


def with_signature(rule: type[Rule]) -> Callable[[F], F]:
    """Show every option with its default where Python is asked for the signature."""

    def decorated(function: F) -> F:
        values = {**defaults(rule), **rule.VARIANTS.get("optax", {}), "seed": None}
        extras = {name: values[name] for name in extra_names(rule) if name not in PSGD_JAX}
        function.__signature__ = shown(function, extras)  # type: ignore[attr-defined]
        SHOWN[rule] = list(inspect.signature(function).parameters)
        return function

    return decorated


def extras(rule: type[Rule], given: Mapping[str, Any]) -> dict[str, Any]:
    """The options given beside the explicit ones, checked for their names, dtypes as names."""
    called = rule.__name__.lower()
    check_renamed(called, given, OPTAX.get(rule.__name__, {}))
    check_known(called, given, [*SHOWN[rule], *(PSGD_JAX if called == "kron" else ())])
    options = {name: value for name, value in given.items() if not (name == "seed" and value is None)}
    return {name: dtype_name(name, v) if name.endswith("_dtype") else v for name, v in options.items()}


def check_renamed(owner: str, given: Mapping[str, Any], theirs: Mapping[str, str]) -> None:
    """Say so if an option has our name where it needs optax's. theirs: by ours, such as "b1" for "betas[0]"."""
    for name, value in given.items():
        if name in theirs.values():
            continue
        if name in theirs:
            raise OptionError(f"{owner} has no option {name!r}: it is {theirs[name]!r} here")
        parts = [theirs[f"{name}[{i}]"] for i in (0, 1) if f"{name}[{i}]" in theirs]
        if parts:
            values = value if is_list(value) and len(value) == 2 else ("...", "...")
            written = ", ".join(f"{part}={each}" for part, each in zip(parts, values, strict=True))
            raise OptionError(f"{owner} has no option {name!r}: it is {' and '.join(parts)} here: write {written}")


def counted(stacked_axes: Any) -> dict[str, Any]:
    """``stacked_axes`` as an option of all leaves, where it is one number for all."""
    return {} if stacked_axes is None or stacks(stacked_axes) else {"stacked_axes": stacked_axes}
