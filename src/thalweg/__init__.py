"""thalweg: optimizers for training large neural networks.

The import names the front end: ``thalweg.numpy``, ``thalweg.torch``, ``thalweg.optax``.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from thalweg.errors import (
    FallbackWarning,
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

__version__ = "0.1.0"

__all__ = [
    "FallbackWarning",
    "NonFiniteError",
    "OptimError",
    "OptionError",
    "ParameterError",
    "ResumeWarning",
    "RuleError",
    "StateError",
    "UnusedOverrideWarning",
    "__version__",
    "set_num_threads",
]

#: The front ends, each with the packages it stands on and the extra that installs them.
_FRONT_ENDS = {"numpy": (("numpy",), ""), "torch": (("torch",), "[torch]"), "optax": (("jax", "optax"), "[jax]")}
#: What everyone knows, as options of rules.
_BASELINES = {"adamw": "LAMB", "sgd": "LARS"}

if TYPE_CHECKING:
    from thalweg import numpy as numpy
    from thalweg import optax as optax
    from thalweg import torch as torch
else:  # unseen by type checkers, which would take every name for one that is there

    def __getattr__(name: str) -> Any:
        """A front end, loaded when it is asked for; for a rule's name, where it is."""
        if name in _FRONT_ENDS:
            return _front_end(name)
        if (told := _whereabouts(name)) is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # ``from thalweg import LAMB`` asks by ``hasattr`` first, and would drop the message of an AttributeError
        importing = sys._getframe(1).f_code.co_name == "_handle_fromlist"
        raise ImportError(told, name=__name__) if importing else AttributeError(told)

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
    from thalweg.rules import RULES

    by_key = {**{rule.lower(): rule for rule in RULES}, **_BASELINES}
    rule = by_key.get(name.lower())
    if rule is None:
        return None
    meant = f"it is {rule}(..., trust=False), and " if name.lower() in _BASELINES else ""
    ways = f"'from thalweg.torch import {rule}', thalweg.optax.{rule.lower()} or thalweg.numpy.{rule}"
    return f"thalweg has no {name!r} of its own: {meant}the import names the front end: {ways}"
