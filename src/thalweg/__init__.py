"""thalweg: optimizers for training large neural networks.

The import names the front end: ``thalweg.numpy``, ``thalweg.torch``, ``thalweg.optax``.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from thalweg.arrays import Scalar, Squares
from thalweg.errors import (
    FallbackWarning,
    HintWarning,
    IdleWarning,
    NonFiniteError,
    OptimError,
    OptionError,
    ParameterError,
    ResumeWarning,
    RuleError,
    StateError,
    UnusedOverrideWarning,
)
from thalweg.kernels.threads import set_num_threads
from thalweg.rules import RULES
from thalweg.rules.blocks import average, clip, inverse_sqrt, is_zero, one_minus_power, ratio_unless, sign
from thalweg.rules.checks import (
    check_bounds,
    check_choice,
    check_count,
    check_flag,
    check_fraction,
    check_number,
    check_pair,
    require,
)
from thalweg.rules.entries import Copy, Count, Factor, Moment, Norm, Square
from thalweg.rules.options import option
from thalweg.rules.rule import Rule, Update
from thalweg.rules.spikes import Spikes

__version__ = "0.3.0.dev0"

__all__ = [
    "Copy",
    "Count",
    "Factor",
    "FallbackWarning",
    "HintWarning",
    "IdleWarning",
    "Moment",
    "NonFiniteError",
    "Norm",
    "OptimError",
    "OptionError",
    "ParameterError",
    "ResumeWarning",
    "Rule",
    "RuleError",
    "Scalar",
    "Spikes",
    "Square",
    "Squares",
    "StateError",
    "UnusedOverrideWarning",
    "Update",
    "__version__",
    "average",
    "check_bounds",
    "check_choice",
    "check_count",
    "check_flag",
    "check_fraction",
    "check_number",
    "check_pair",
    "clip",
    "inverse_sqrt",
    "is_zero",
    "one_minus_power",
    "option",
    "ratio_unless",
    "require",
    "set_num_threads",
    "sign",
]

#: The front ends, each with the packages it stands on and the extra that installs them.
_FRONT_ENDS = {"numpy": (("numpy",), ""), "torch": (("torch",), "[torch]"), "optax": (("jax", "optax"), "[jax]")}
if TYPE_CHECKING:
    from thalweg import numpy as numpy
    from thalweg import optax as optax
    from thalweg import torch as torch
else:  # unseen by type checkers, which would take every name for one that is there

    def __getattr__(name: str) -> Any:
        """A front end, loaded when it is asked for; for the name of a rule, where it is."""
        if name in _FRONT_ENDS:
            return _front_end(name)
        if (message := _whereabouts(name)) is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # ``from thalweg import LAMB`` asks by ``hasattr`` first, and would drop the message of an AttributeError
        importing = sys._getframe(1).f_code.co_name == "_handle_fromlist"
        raise ImportError(message, name=__name__) if importing else AttributeError(message)

    def __dir__() -> list[str]:
        return [*globals(), *_FRONT_ENDS]


def _front_end(name: str) -> Any:
    packages, extra = _FRONT_ENDS[name]
    try:
        return importlib.import_module(f"thalweg.{name}")
    except ModuleNotFoundError as missing:
        if missing.name not in packages:
            raise
        install = f'pip install "thalweg{extra}"'
        raise AttributeError(f"thalweg.{name} needs {missing.name}, which is not installed: {install}") from missing


def _whereabouts(name: str) -> str | None:
    """For the name of an optimizer, a sentence that says how to import it."""
    rule = {rule.lower(): rule for rule in RULES}.get(name.lower())
    if rule is None:
        return None
    ways = f"'from thalweg.torch import {rule}', thalweg.optax.{rule.lower()} or thalweg.numpy.{rule}"
    return f"thalweg has no {name!r} of its own: the import names the front end: {ways}"
