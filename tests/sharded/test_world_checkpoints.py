"""A checkpoint of some ranks is resumed by any number of others, whatever the options: all state to the bit.

`thalweg check --ranks` has more layouts and forms, for every rule with the options it comes with.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from lanes import by_turns, one_in  # noqa: E402
from world import world  # noqa: E402
from world_checkpoints import CASES, NAMES, RULES, resume, save  # noqa: E402

pytestmark = pytest.mark.slow

EVERY = pytest.mark.parametrize("case", one_in(3, NAMES))
#: One of each kind of state.
KINDS = [
    "LARS, bfloat16 momentum",
    "LAMB, overrides",
    "LAMB, spikes and accumulated",
    "Adafactor, some factored",
    "Kron",
]
SOME = pytest.mark.parametrize("case", [name for name in KINDS if CASES[name][0] in RULES])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Checkpoints, each made once."""
    made: dict[tuple[str, ...], Path] = {}

    def checkpoint(case: str, layout: str, ranks: int, way: str = "nested") -> Path:
        key = case, layout, str(ranks), way
        if key not in made:
            folder = tmp_path_factory.mktemp("saved")
            world(ranks).run(save, folder, case, layout, way)
            made[key] = folder
        return made[key]

    return checkpoint


@by_turns()
@EVERY
@pytest.mark.parametrize(
    ("before", "ranks", "after", "others"),
    [
        ("FSDP2", 2, "plain", 1),
        ("plain", 1, "FSDP2", 2),
        ("FSDP2", 2, "FSDP2", 4),
        ("FSDP2", 2, "TP", 2),
    ],
)
def test_elsewhere(saved: Callable[..., Path], case: str, before: str, ranks: int, after: str, others: int) -> None:
    assert world(others).run(resume, saved(case, before, ranks), case, after) == [[]] * others


@by_turns("way", first=2)
@SOME
@pytest.mark.parametrize("way", ["full, flat", "offloaded"])
def test_other_forms_of_a_state_dict(saved: Callable[..., Path], case: str, way: str) -> None:
    assert world(2).run(resume, saved(case, "FSDP2", 2, way), case, "TP", way) == [[]] * 2
