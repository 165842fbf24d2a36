"""Read files that lie for some time, and say which of them are not refused as they should be.

python tools/fuzz.py [SECONDS [KIND ...]]    60 if nothing is said; every kind of file, or those named, in turns

Each fault is told with the file that shows it, which stays in build/fuzz; at the end each kind, with files and time.
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


def every_kind() -> dict[str, Kind]:
    """All kinds whose readers can be imported."""
    found = kinds(OUT)
    try:
        from hostile_states import states
    except ImportError as error:
        sys.stdout.write(f"without states of torch and optax: {error}\n")
        return found
    return {**found, **states()}


def main(seconds: float, *names: str) -> int:
    OUT.mkdir(parents=True, exist_ok=True)
    known, faults = every_kind(), dict[str, Path]()
    chosen = {name: known[name] for name in names or known}
    files, spent = dict.fromkeys(chosen, 0), dict.fromkeys(chosen, 0.0)
    number = random.SystemRandom().randrange(2**32)
    sys.stdout.write(f"== fuzz, from seed {number}\n")
    for kind in chosen.values():  # what is imported for the first whole file of a kind counts for none
        path = OUT / kind.name
        path.write_bytes(kind.written(kind.says))
        kind.read(path)
    for name, content in bombs().items():
        if (reader := name.partition("/")[2]) in chosen:
            path = OUT / reader
            path.write_bytes(content)
            if (fault := tried(known[reader], path)) is not None:
                faults[f"{name}: {fault}"] = path
                sys.stdout.write(f"{name}: {fault}\n")
    while sum(spent.values()) < seconds:
        for name, kind in chosen.items():
            begun = time.monotonic()
            turn(kind, number, faults)
            number, files[name], spent[name] = number + 1, files[name] + TURN, spent[name] + time.monotonic() - begun
    for name in chosen:
        sys.stdout.write(f"{name:30} {files[name]:9,} files {spent[name] / 60:6.1f} min\n")
    sys.stdout.write(f"{sum(files.values()):,} files in {sum(spent.values()):.0f} s, {len(faults)} faults\n")
    return bool(faults)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    asked = sys.argv[1:] or ["60"]
    raise SystemExit(main(float(asked[0]), *asked[1:]))
