"""thalweg: optimizers for training large neural networks.

The import names the front end: ``thalweg.numpy``, ``thalweg.torch``, ``thalweg.optax``.
"""

from __future__ import annotations

from thalweg.errors import (
    FallbackWarning,
    NonFiniteError,
    OptimError,
    OptionError,
    ParameterError,
    ResumeWarning,
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
    "StateError",
    "UnusedOverrideWarning",
    "__version__",
    "set_num_threads",
]
