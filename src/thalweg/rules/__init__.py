"""The mathematics: update rules, in order of increasing complexity.

Each is a frozen dataclass of options with pure methods over an abstract array library, in a file of its own.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator, Mapping

from thalweg.rules.adafactor import Adafactor
from thalweg.rules.adamw import AdamW
from thalweg.rules.around import Around, around
from thalweg.rules.averaged import Averaged
from thalweg.rules.cautious import Cautious
from thalweg.rules.grafted import Grafted
from thalweg.rules.kron import Kron
from thalweg.rules.lamb import LAMB
from thalweg.rules.lars import LARS
from thalweg.rules.muon import Muon
from thalweg.rules.rule import Noise, Rule, Update
from thalweg.rules.schedule_free import ScheduleFree
from thalweg.rules.schedules import Annealed
from thalweg.rules.sgd import SGD
from thalweg.rules.soap import SOAP
from thalweg.rules.spikes import Spikes
from thalweg.rules.whole import Direction, Preparation, WholeRule


def find_rules() -> Iterator[type[Rule]]:
    """The rules in the files of this folder, in the order of their names."""
    for file in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{file.name}")
        for value in vars(module).values():
            is_rule = inspect.isclass(value) and issubclass(value, Rule) and value.__module__ == module.__name__
            if is_rule and not inspect.isabstract(value) and not issubclass(value, Around):
                yield value


_ORDERED: list[type[Rule]] = [SGD, AdamW, LARS, LAMB, Adafactor, Muon, Kron, SOAP, *find_rules()]
#: Every rule that comes with the package, by its name. Of a new one its file is enough.
RULES: Mapping[str, type[Rule]] = {rule.__name__: rule for rule in dict.fromkeys(_ORDERED)}

#: What every optimizer can have around its rule, by an option of its own, in the order from the rule outwards.
AROUND: tuple[type[Around], ...] = (Grafted, Cautious, ScheduleFree, Averaged)

__all__ = [
    "AROUND",
    "LAMB",
    "LARS",
    "RULES",
    "SGD",
    "SOAP",
    "Adafactor",
    "AdamW",
    "Annealed",
    "Around",
    "Averaged",
    "Cautious",
    "Direction",
    "Grafted",
    "Kron",
    "Muon",
    "Noise",
    "Preparation",
    "Rule",
    "ScheduleFree",
    "Spikes",
    "Update",
    "WholeRule",
    "around",
]
