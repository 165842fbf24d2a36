"""What comes of a step, whichever code takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from thalweg.optax.states import Entries


class Results(NamedTuple):
    """New values of some parameters, their states and figures."""

    #: Changes, or new parameters.
    values: list[Any]
    states: list[Entries]
    #: Whether all of it is finite; None: it was not asked.
    fine: Any
    stats: Sequence[Mapping[str, Any]]
