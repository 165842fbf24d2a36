"""torch tensors stepped by native code: saving and resuming, float16 that overflows, processes."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from typing import Any

import pytest
from lanes import by_turns
from side_by_side import every_rule, needs_core

torch = pytest.importorskip("torch")

from side_by_side_torch import FULL, agree, gradients, make, parameters, train  # noqa: E402

import thalweg.torch  # noqa: E402
from thalweg.errors import ResumeWarning  # noqa: E402

pytestmark = needs_core


@by_turns("first", "dtype")
@every_rule
@pytest.mark.parametrize(("first", "second"), [("fused", "reference"), ("reference", "fused"), ("fused", "foreach")])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_saved_under_one_engine_and_resumed_under_another(rule: str, first: str, second: str, dtype: str) -> None:
    steps, steady = gradients(6, dtype), parameters(dtype)
    reference = make(rule, steady, "reference", **FULL[rule])
    train(reference, steady, steps)
    named = parameters(dtype)
    optimizer = make(rule, named, first, **FULL[rule])
    train(optimizer, named, steps[:3])
    resumed = make(rule, named, second, **FULL[rule])
    with pytest.warns(ResumeWarning, match=f"saved with engine='{first}'"):
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(resumed, named, steps[3:])
    assert resumed.engine == second
    agree(resumed, named, reference, steady)


@every_rule
def test_float16_that_would_overflow_is_skipped_alone(rule: str) -> None:
    """Its gradient is fine, so the others go on: as the reference engine has it."""
    both = []
    for engine in ("fused", "reference"):
        named = [("large", torch.nn.Parameter(torch.full((40,), 65_000.0).half())), ("fine", parameters()[1][1])]
        options = dict(trust=False) if rule != "Adafactor" else {}
        optimizer = make(rule, named, engine, lr=1e4, on_nonfinite="skip", **options)
        for _, p in named:
            p.grad = -torch.ones_like(p)
        optimizer.step()
        assert (named[0][1] == 65_000).all()
        assert optimizer.state[named[0][1]]["step"] == 0
        both.append((optimizer, named))
    agree(*both[0], *both[1])


FORK = """
import os, select, signal, torch
from thalweg.torch import LAMB
import thalweg
torch.set_num_threads(2)
thalweg.set_num_threads(2)

def trained():
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(300_000))
    optimizer = LAMB([p], engine="fused")
    for _ in range(2):
        p.grad = torch.randn(300_000)
        optimizer.step()
    return p.detach()[:1000].numpy().tobytes()

expected = trained()
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    torch.set_num_threads(1)  # torch's own operations would wait for ever for threads that are not there
    thalweg.set_num_threads(2)
    os.write(writing, trained())
    os._exit(0)
answered, _, _ = select.select([reading], [], [], 10)
answer = os.read(reading, 4000) if answered else b""
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
assert answered, "the child did not answer"
assert answer == expected
assert trained() == expected
print("fine")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.nightly
def test_a_forked_child_steps_and_so_does_its_parent() -> None:
    """Whatever threads torch had: they do not exist in the child."""
    result = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=False, timeout=120)
    assert (result.returncode, result.stdout.strip()) == (0, "fine"), result.stderr


def test_stats_have_the_rate_and_the_figures() -> None:
    named: Any = parameters()
    optimizer = make("LAMB", named, lr=0.5, overrides=[("matrix", dict(lr_scale=0.5))])
    train(optimizer, named, gradients(1))
    stats = optimizer.stats()
    assert list(stats["matrix"]) == ["lr", "trust_ratio", "param_norm", "update_norm", "grad_norm"]
    assert (stats["matrix"]["lr"], stats["vector"]["lr"]) == (0.25, 0.5)


def test_kron_as_it_comes_has_its_noise_from_native_code() -> None:
    """A probability that is annealed is known to the host as a number is."""
    weights = torch.nn.Parameter(torch.ones(4, 3))
    weights.grad = torch.ones(4, 3)
    optimizer = thalweg.torch.Kron([weights], lr=0.01)
    optimizer.step()
    assert optimizer.engine == "fused"
