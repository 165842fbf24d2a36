"""torch tensors stepped by native code: saving and resuming, copies, autograd, backward passes, processes."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from typing import Any

import pytest
from side_by_side import every_rule, needs_core

torch = pytest.importorskip("torch")

from side_by_side_torch import FULL, agree, gradients, make, parameters, train  # noqa: E402

import thalweg.torch  # noqa: E402
from thalweg.errors import NonFiniteError, ResumeWarning  # noqa: E402

pytestmark = needs_core


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
def test_one_parameter_at_a_time(rule: str) -> None:
    steps, named, single = gradients(3), parameters(), parameters()
    whole, parts = make(rule, named, **FULL[rule]), make(rule, single, **FULL[rule])
    train(whole, named, steps)
    for step in steps:
        for name, p in single:
            p.grad = step[name]
            parts.step_parameter(p)
            assert parts.engine == "fused"
    assert all(torch.equal(p, q) for (_, p), (_, q) in zip(named, single, strict=True))
    for (_, p), (_, q) in zip(named, single, strict=True):
        assert all(torch.equal(entry, parts.state[q][key]) for key, entry in whole.state[p].items())


@every_rule
def test_in_the_backward_pass(rule: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    twin = copy.deepcopy(model)
    optimizer, other = make(rule, model.named_parameters()), make(rule, twin.named_parameters(), "reference")
    x = torch.randn(20, 6)
    with thalweg.torch.step_in_backward(model, optimizer):
        for _ in range(3):
            model(x).square().sum().backward()
            other.zero_grad()
            twin(x).square().sum().backward()
            other.step()
    assert optimizer.engine == "fused"
    agree(optimizer, list(model.named_parameters()), other, list(twin.named_parameters()))


@every_rule
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e25])
@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_steps_that_are_refused_are_not_begun(rule: str, poison: float, policy: str) -> None:
    """The decisions of the reference engine, and not a bit is written."""
    for at in (0, 2):
        counts = []
        for engine in ("fused", "reference"):
            named, steps = parameters(), gradients(3)
            optimizer = make(rule, named, engine, on_nonfinite=policy, **FULL[rule])
            train(optimizer, named, steps[:at])
            steps[at]["matrix"][-1, -1] = poison
            before = [p.detach().clone() for _, p in named]
            state = {p: {k: v.clone() for k, v in entries.items()} for p, entries in optimizer.state.items()}
            if policy == "raise":
                with pytest.raises(NonFiniteError, match="'matrix'"):
                    train(optimizer, named, steps[at : at + 1])
                assert set(optimizer.state) == set(state)
            else:
                train(optimizer, named, steps[at : at + 1])
                counts.append((optimizer.skipped, optimizer.nonfinite()))
            assert all(torch.equal(p, w) for (_, p), w in zip(named, before, strict=True))
            assert all(torch.equal(optimizer.state[p][k], v) for p, e in state.items() for k, v in e.items())
        assert policy == "raise" or counts == [(1, ["matrix"])] * 2


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
@pytest.mark.slow
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
