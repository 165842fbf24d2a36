"""Plain numbers as a space: for what a rule derives from the step and its options, on the host."""

from __future__ import annotations

import math
from collections.abc import Callable

from thalweg.arrays import number_log, number_maximum, number_minimum

sqrt: Callable[[float], float] = math.sqrt
log = number_log
expm1: Callable[[float], float] = math.expm1
maximum = number_maximum
minimum = number_minimum
