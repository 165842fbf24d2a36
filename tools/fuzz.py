"""Read files that lie for some time, and say which of them are not refused as they should be.

python tools/fuzz.py [SECONDS]    60 if nothing is said; every kind of file in turns

Each fault is told with the file that shows it, which stays in build/fuzz.
"""

from __future__ import annotations

import random
import sys
import time
import warnings
from pathlib import Path

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from hostile_files import Kind, bombs, hostile, kinds, tried  # noqa: E402

OUT = ROOT / "build" / "fuzz"
#: Files of one kind before the next one has its turn.
TURN = 200


def turn(kind: Kind, number: int, faults: dict[str, Path]) -> None:
    """Read some files of a kind; keep one file for each fault that was not seen before."""
    path = OUT / kind.name

    @seed(number)
    @settings(
        max_examples=TURN,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
    )
    @given(st.data())
    def look(data: st.DataObject) -> None:
        content = data.draw(hostile(kind))
        path.write_bytes(content)
        if (fault := tried(kind, path)) is not None and (told := f"{kind.name}: {fault:.200}") not in faults:
            faults[told] = OUT / f"{len(faults)}-{kind.name}"
            faults[told].write_bytes(content)
            sys.stdout.write(f"{told}\n    {faults[told]}\n")

    look()


def main(seconds: float) -> int:
    OUT.mkdir(parents=True, exist_ok=True)
    known, faults, files = kinds(OUT), dict[str, Path](), 0
    begun, number = time.monotonic(), random.SystemRandom().randrange(2**32)
    sys.stdout.write(f"== fuzz, from seed {number}\n")
    for kind in known.values():  # what is imported for the first whole file of a kind counts for none
        path = OUT / kind.name
        path.write_bytes(kind.written(kind.says))
        kind.read(path)
    for name, content in bombs().items():
        kind = known[name.partition("/")[2]]
        path = OUT / kind.name
        path.write_bytes(content)
        if (fault := tried(kind, path)) is not None:
            faults[f"{name}: {fault}"] = path
            sys.stdout.write(f"{name}: {fault}\n")
    while time.monotonic() - begun < seconds:
        for kind in known.values():
            turn(kind, number, faults)
            number, files = number + 1, files + TURN
    sys.stdout.write(f"{files:,} files in {time.monotonic() - begun:.0f} s, {len(faults)} faults\n")
    return bool(faults)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    raise SystemExit(main(float(sys.argv[1]) if len(sys.argv) > 1 else 60))
