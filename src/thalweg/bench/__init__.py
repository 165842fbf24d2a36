"""The bench: how long a step takes on this machine, ours and others' in turns.

``thalweg.bench.bench`` measures and returns what it found; ``thalweg bench`` shows it.
"""

from __future__ import annotations

from thalweg.bench.record import Bench, Comparison, Row
from thalweg.bench.rounds import Progress
from thalweg.bench.run import Stopped, bench

__all__ = ["Bench", "Comparison", "Progress", "Row", "Stopped", "bench"]
