"""The peak of memory during a step, beyond what there was before it, measured in a process of its own."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

#: Freed memory goes back to the system at once: else what an earlier step left behind would count as there before.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_TOP_PAD_": "0"}
WARM_UP = 2


def extra_memory(model: str, rule: str, name: str, engine: str) -> dict[str, Any]:
    """Bytes at the peak of a step and before it; or why there are none, under ``"skipped"``."""
    command = [sys.executable, str(Path(__file__).resolve()), model, rule, name, engine]
    run = subprocess.run(command, env={**os.environ, **GIVE_BACK}, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        return {"skipped": (run.stderr.strip().splitlines() or [f"exit status {run.returncode}"])[-1]}
    return json.loads(run.stdout.splitlines()[-1])


def trim() -> None:
    """Give freed memory back to the system, where the allocator can be asked to."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def status(key: str) -> int:
    """An entry of /proc/self/status, in bytes: VmRSS is what is in memory now, VmHWM the most there has been."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


def main(model_name: str, rule: str, name: str, engine: str) -> None:
    from contestants import CONTESTANTS, Model

    model = Model(model_name)
    ready = next(c for c in CONTESTANTS if (c.rule, c.name) == (rule, name)).make(model, engine)
    for _ in range(WARM_UP):  # state is made, functions are compiled
        ready.prepare()
        ready.step()
    ready.prepare()
    trim()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM begins anew
    before = status("VmRSS")
    ready.step()
    extra = max(0, status("VmHWM") - before)
    found = {"before": before, "extra": extra, "percent": 100 * extra / (4 * model.elements)}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
