"""The mathematics: four update rules, in order of increasing complexity.

Each is a frozen dataclass of options with pure methods over an abstract array library.
"""

from __future__ import annotations

from collections.abc import Mapping

from thalweg.rules.adafactor import Adafactor
from thalweg.rules.kron import Kron
from thalweg.rules.lamb import LAMB
from thalweg.rules.lars import LARS
from thalweg.rules.rule import Noise, Rule, Update
from thalweg.rules.schedules import Annealed

#: Every rule by its name. A new rule is a row here.
RULES: Mapping[str, type[Rule]] = {rule.__name__: rule for rule in (LARS, LAMB, Adafactor, Kron)}

__all__ = ["LAMB", "LARS", "RULES", "Adafactor", "Annealed", "Kron", "Noise", "Rule", "Update"]
