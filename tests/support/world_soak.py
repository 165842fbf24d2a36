"""A long run that saves checkpoints as it goes, and of which a rank may be killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from world_checkpoints import Training, apart, read, torch, write

#: Steps from checkpoint to checkpoint.
EVERY = 20


def soak(folder: Path, case: str, layout: str, last: int, dies_at: int | None = None, **made: Any) -> list[str]:
    """Train from the newest checkpoint up to a step, and tell what differs from a run without interruption.

    dies_at: the step before which the last rank is killed.
    """
    training = Training(case, layout, **made)
    known = sorted(int(each.name) for each in folder.iterdir() if (each / ".metadata").exists())
    first = known[-1] if known else 0
    if first:
        read(training, folder / str(first), "nested")
    for step in range(first, last):
        if step == dies_at and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        training.steps(step, step + 1)
        if (step + 1) % EVERY == 0:
            write(training, folder / str(step + 1), "nested")
    alone = Training(case, "plain", **made)
    alone.steps(0, last)
    return [f"from step {first}: {line}" for line in apart(alone.snapshot(), training.snapshot())]
