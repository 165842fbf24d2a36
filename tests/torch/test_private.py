"""What torch does not publish has fallbacks, and with these the steps are the same to the bit."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from day import BY_DAY
from networks import make, model, train
from torch.optim.optimizer import register_optimizer_step_post_hook

from thalweg.rules import RULES
from thalweg.torch import private

#: By day, one rule of each kind.
TRIED = ("AdamW", "Adafactor", "Muon", "Kron") if BY_DAY else RULES


def told() -> str:
    """The bits of steps of rules by every engine, some under autocast, and how many of them a hook has seen."""
    digest, seen = hashlib.sha256(), list[object]()
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: seen.append(optimizer))
    for rule, engine in ((rule, engine) for rule in TRIED for engine in ("auto", "foreach", "reference")):
        net = model(torch.float32)
        params = [p for p in net.parameters() if rule != "Muon" or p.ndim == 2]
        optimizer, again = (make(rule, params, engine, max_grad_norm=1.0) for _ in range(2))
        train(net, optimizer, 3)
        again.load_state_dict(optimizer.state_dict())
        with torch.autocast("cpu", torch.bfloat16):
            train(net, again, 1)
        for x in (*params, *(entry for p in params for entry in again.state[p].values())):
            digest.update(x.detach().contiguous().numpy().tobytes())
    handle.remove()
    return f"{digest.hexdigest()} {len(seen)}"


@pytest.mark.slow
def test_every_fallback_steps_to_the_same_numbers() -> None:
    """make test-all runs all tests of torch with them."""
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]
    script = f"import sys; sys.path[:0] = {paths}; import test_private as own; print(own.private.USED, own.told())"
    command, surroundings = [sys.executable, "-c", script], {**os.environ, "THALWEG_TORCH_PRIVATE": "0"}
    done = subprocess.run(command, env=surroundings, stdout=subprocess.PIPE, text=True, check=True)
    assert private.USED
    assert done.stdout == f"False {told()}\n"
