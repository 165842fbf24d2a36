"""The lines of each room of the project and the most that it may have: ``python tools/size.py``; 1 if a room is over.

Files under version control count, with all of their lines; without git, all files that are there. Pages count by words.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CODE = (".py", ".h", ".cpp", ".js", ".css", ".html")
#: Of each room: the most lines, and where they are. A path belongs to the first room that names the start of it.
ROOMS: dict[str, tuple[int, tuple[str, ...]]] = {
    "rules": (4638, ("src/thalweg/rules/",)),
    "spaces and programs": (3550, ("src/thalweg/spaces/", "src/thalweg/programs/")),
    "kernels/triton": (3947, ("src/thalweg/kernels/triton/",)),
    "kernels without triton": (5067, ("src/thalweg/kernels/",)),
    "torch": (8683, ("src/thalweg/torch/",)),
    "optax": (4126, ("src/thalweg/optax/",)),
    "numpy": (955, ("src/thalweg/numpy/",)),
    "race": (1899, ("src/thalweg/race/",)),
    "plan": (609, ("src/thalweg/plan/",)),
    "check and audit": (4273, ("src/thalweg/check/", "src/thalweg/audit/")),
    "show and integrations": (1156, ("src/thalweg/show/", "src/thalweg/integrations/")),
    "top-level modules": (2832, ("src/thalweg/",)),
    "tests": (26646, ("tests/",)),
    "tools": (841, ("tools/",)),
    "words of the docs": (40000, ("docs/", "README.md")),
}


def files() -> list[str]:
    """The paths that count; those of an sdist are all that it has."""
    if (ROOT / ".git").exists():
        listed = subprocess.check_output(["git", "-c", "safe.directory=*", "ls-files"], cwd=ROOT, text=True)
        return [path for path in listed.splitlines() if (ROOT / path).exists()]
    return [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.*")]


def count() -> dict[str, int]:
    """What each room has."""
    counted = dict.fromkeys(ROOMS, 0)
    for path in files():
        room = next((name for name, (_, starts) in ROOMS.items() if path.startswith(starts)), None)
        if room is not None and path.endswith(".md" if "words" in room else CODE):
            text = (ROOT / path).read_text(encoding="utf-8")
            counted[room] += len(text.split() if "words" in room else text.splitlines())
    return counted


if __name__ == "__main__":
    counted = count()
    for room, number in counted.items():
        most = ROOMS[room][0]
        print(f"{room:<24} {number:7,} of {most:7,}{'   OVER' if number > most else ''}")
    raise SystemExit(any(number > ROOMS[room][0] for room, number in counted.items()))
