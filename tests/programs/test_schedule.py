"""Passes over memory: the fewest bytes that a rule can be stepped with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from thalweg.programs.budget import passes_of, sizes_of
from thalweg.rules import RULES
from thalweg.settings import ParameterOptions, RuleOptions

MATRIX = (1024, 512)


def setting_of(name: str, **options: Any) -> ParameterOptions:
    return RuleOptions(RULES[name], {**({"momentum": 0.9} if name == "SGD" else {}), **options}).base


def passes(name: str, dtype: str = "float32", shape: tuple[int, ...] = MATRIX, **options: Any) -> list[int]:
    """Bytes of each pass for each element; what is smaller than a parameter not counted."""
    setting = setting_of(name, **options)
    size = sizes_of(setting, shape, dtype)
    found = [sum(size[key] for key in (*each.reads, *each.writes)) for each in passes_of(setting, shape, dtype).passes]
    elements = size["p"] // {"float32": 4, "bfloat16": 2, "float64": 8}[dtype]
    assert all(each % elements == 0 for each in found)
    return [each // elements for each in found]


@pytest.mark.parametrize(
    ("name", "options", "wanted"),
    [
        ("SGD", {}, [20]),
        ("SGD", {"momentum": 0.0}, [12]),
        ("SGD", {"nesterov": True}, [20]),
        ("AdamW", {}, [28]),
        ("LARS", {}, [8, 20]),
        ("LARS", {"norm_mode": "combined", "weight_decay": 0.1}, [8, 20]),
        ("LAMB", {}, [24, 16]),
        ("LAMB", {"weight_decay": 0.1, "weight_decay_mode": "l2"}, [24, 16]),
        ("Adafactor", {}, [8, 4, 12]),
        ("Adafactor", {"momentum": 0.9}, [8, 4, 20]),
        ("Adafactor", {"factored": False}, [16, 16]),
        ("Adafactor", {"clip_threshold": None, "scale_parameter": False}, [4, 12]),
        ("Adafactor", {"factored": False, "clip_threshold": None, "scale_parameter": False}, [20]),
        # what goes element by element adds no pass, and a sum joins those of the rule
        ("AdamW", {"averaged": 0.9}, [36]),
        ("AdamW", {"schedule_free": True, "betas": (0.0, 0.9)}, [36]),
        ("AdamW", {"cautious": "decay"}, [28]),
        ("AdamW", {"cautious": True}, [12, 24]),
        ("LAMB", {"cautious": True, "exempt": None}, [24, 20]),
        # what comes back rounded is not read back: it is computed again, from what it was made of
        ("LAMB", {"state_dtype": "bfloat16"}, [12, 20]),
        ("AdamW", {"state_dtype": "bfloat16"}, [20]),
        # nothing is written before it is known to be finite
        ("LAMB", {"on_nonfinite": "skip"}, [16, 28]),
        ("SGD", {"on_nonfinite": "raise"}, [4, 20]),
        ("Adafactor", {"factored": False, "on_nonfinite": "skip"}, [12, 20]),
    ],
)
def test_passes_are_those_of_the_best_code_by_hand(name: str, options: dict[str, Any], wanted: list[int]) -> None:
    assert passes(name, **options) == wanted


def test_parameters_of_16_bits() -> None:
    assert passes("LAMB", "bfloat16") == [2 + 2 + 8 + 8, 2 + 8 + 2]
    assert passes("SGD", "bfloat16") == [2 + 2 + 4 + 2 + 4]


def test_the_page_of_engines_tells_the_same() -> None:
    page = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
    rows = dict(re.findall(r"^\| ([^|]+?) \| [^|]+ \| ([^|]+?) \|$", page, re.MULTILINE))
    shown = {
        name: [int(number) for number in rows[name].split(" + ")] for name in ("LARS", "LAMB", "Adafactor, factored")
    }
    assert shown == {"LARS": passes("LARS"), "LAMB": passes("LAMB"), "Adafactor, factored": passes("Adafactor")}
    assert rows["Adafactor, all squares"] == " + ".join(map(str, passes("Adafactor", shape=(64,))))
    assert (
        rows["SGD with momentum, AdamW; LARS and LAMB with `trust=False`"]
        == f"{passes('SGD')[0]} or {passes('AdamW')[0]}"
    )
