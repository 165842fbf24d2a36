"""thalweg: optimizers for training large neural networks.

The import names the front end: ``thalweg.numpy``, ``thalweg.torch``, ``thalweg.optax``.
"""

from __future__ import annotations

from thalweg.errors import NonFiniteError, OptimError, OptionError, ParameterError, StateError, UnusedOverrideWarning

__version__ = "0.1.0"

__all__ = [
    "NonFiniteError",
    "OptimError",
    "OptionError",
    "ParameterError",
    "StateError",
    "UnusedOverrideWarning",
    "__version__",
]
