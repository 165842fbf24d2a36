"""The house as it was meant: rules are formulas, and every file is used."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_rules_are_pure_formulas() -> None:
    """No rule asks for a framework, a dtype, a device or a generator, or changes anything in place."""
    assert (ROOT / "src/thalweg/py.typed").exists()
    words = ("import numpy", "import torch", "import jax", ".device", "random.", " += ", " -= ", " *= ", " /= ")
    for path in (ROOT / "src/thalweg/rules").glob("*.py"):
        assert [word for word in words if word in path.read_text()] == [], path.name
