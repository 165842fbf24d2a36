"""What muon_adamw does with the parameters of many families, against the table in docs/mixtures.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

from families import FAMILIES, OF_TORCH, make

from thalweg.torch.routing import HIDDEN, OTHER, roles_of

PAGE = Path(__file__).parents[2] / "docs" / "mixtures.md"


def row_of(family: str) -> str:
    """A row of the table: what Muon does not take for one matrix as it lies, and what AdamW takes with decay."""
    turned: dict[str, dict[str, None]] = {}
    others: dict[str, None] = {}
    roles = roles_of(make(family))
    assert not any(role.hint for role in roles.values() if role.role == HIDDEN)
    for name, role in roles.items():
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
        # the sizes of a tiny model say nothing of another: those of fused blocks are told by their number
        shown = {
            key: f"{len(value)} sizes" if isinstance(value, tuple) else value for key, value in role.options.items()
        }
        if role.role == HIDDEN and shown:
            turned.setdefault(", ".join(f"{key}={value}" for key, value in shown.items()), {})[f"`{pattern}`"] = None
        if role.role == OTHER:
            others[f"`{pattern}`" + (" (hint)" if role.hint else "")] = None
    options = "; ".join(f"{', '.join(names)}: {said}" for said, names in turned.items())
    return f"| {family} | {options} | {', '.join(others)} |"


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in OF_TORCH else pytest.mark.slow) for name in FAMILIES]
)
def test_the_table_tells_what_is_done(family: str) -> None:
    if family not in OF_TORCH:
        pytest.importorskip("transformers")
    rows = {line.split(" | ")[0].strip("| "): line for line in PAGE.read_text().splitlines() if line.startswith("| ")}
    assert rows[family] == row_of(family)
