"""Spaces beside that of numpy, in what no engine shows: one compiled graph, rounding, lists, jax as it comes."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from cases import KRON, LAMB, Case
from drive import gradients, run
from tolerances import SPACE

from thalweg.boundary import advance
from thalweg.settings import Handling
from thalweg.storage import first_state

STEPS = 10


def compare(reference: tuple, result: tuple, dtype: str, shape: tuple) -> None:
    (p, s), (q, r) = reference, result
    assert q.dtype == dtype
    assert s.keys() == r.keys()
    for key, (a, b) in {"p": (p, q), **{key: (s[key], r[key]) for key in s}}.items():
        assert a.shape == b.shape, (key, shape)
        assert a.dtype == b.dtype, (key, shape)
        assert np.abs(a - b).max(initial=0) <= SPACE[dtype] * max(1.0, np.abs(a).max(initial=0)), (key, shape)


@pytest.mark.slow
@pytest.mark.parametrize("case", [LAMB, KRON], ids=lambda case: case.name)
def test_torch_compile_without_a_graph_break(case: Case) -> None:
    """One graph, made once, whatever the step."""
    torch = pytest.importorskip("torch")
    from torch._dynamo.testing import CompileCounter

    from thalweg.spaces import torch as xp

    rule, shape = case.rule(), (6, 4)
    p, grads = gradients(shape, STEPS)
    counter = CompileCounter()
    torch._dynamo.reset()
    result = run(
        rule,
        torch.tensor(p),
        [torch.tensor(g) for g in grads],
        lr=case.lr,
        xp=xp,
        step=lambda function: torch.compile(function, fullgraph=True, backend=counter),
        count=torch.tensor,
    )
    assert counter.frame_count == 1
    numpy_result = result[0].numpy(), {key: entry.numpy() for key, entry in result[1].items()}
    compare(run(rule, p, grads, lr=case.lr), numpy_result, "float64", shape)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_sixteen_bits_round_alike(dtype: str, rounding: str) -> None:
    """The same sixteen bits from every library: the random numbers are the same, and so is the rounding."""
    pytest.importorskip("ml_dtypes")
    from thalweg.spaces import numpy as reference

    handling = Handling(rounding=rounding, momentum_dtype="bfloat16")
    p, grads = gradients((40, 30), 3, dtype=np.float32)
    narrow = p.astype(reference.named_dtype(dtype))
    expected, state = run(LAMB.rule(), narrow, grads, lr=1e-3, handling=handling)
    assert expected.dtype.name == dtype
    assert state["exp_avg"].dtype.name == "bfloat16"
    assert state["exp_avg_sq"].dtype == np.float32
    for framework in ("torch", "jax"):
        pytest.importorskip(framework)
        if framework == "torch":
            import torch

            from thalweg.spaces import torch as xp

            start, gs = torch.tensor(p).to(getattr(torch, dtype)), [torch.tensor(g) for g in grads]
            found = run(LAMB.rule(), start, gs, lr=1e-3, handling=handling, xp=xp)[0].float().numpy()
        else:
            import jax.numpy as jnp

            from thalweg.spaces import jax as xp

            start, gs = jnp.asarray(p).astype(dtype), [jnp.asarray(g) for g in grads]
            found = np.asarray(run(LAMB.rule(), start, gs, lr=1e-3, handling=handling, xp=xp)[0].astype("float32"))
        # float32 arithmetic differs in its last digit between libraries, which a rounding may amplify
        assert np.mean(found == expected.astype(np.float32)) > 0.999


def test_foreach_selects_tensor_by_tensor_where_schedules_differ() -> None:
    """Two tensors, one due for a refresh and one not, in one list."""
    torch = pytest.importorskip("torch")
    from thalweg.spaces import foreach as xp

    rule, handling = KRON.rule(precond_update_probability=0.5), Handling()
    p = xp.TensorList([torch.ones(3, 3, dtype=torch.float64), torch.ones(3, 3, dtype=torch.float64)])
    g = xp.TensorList([torch.eye(3, dtype=torch.float64), torch.eye(3, dtype=torch.float64)])
    s = first_state(xp, rule, handling, p)
    s["refresh"] = xp.TensorList([torch.tensor(0.5, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64)])
    result = advance(xp, rule, handling, p, g, s, t=1, lr=0.1, lr_scale=1.0, tensor=0)
    due, waiting = result.state["Q_0"].tensors
    assert not torch.equal(due, torch.eye(3, dtype=torch.float64))
    assert torch.equal(waiting, torch.eye(3, dtype=torch.float64))


def test_jax_as_it_comes() -> None:
    """Without the 64-bit mode of these tests: float32 and 32-bit integers, traced steps, noise and rounding."""
    pytest.importorskip("jax")
    script = """
import jax, jax.numpy as jnp, numpy as np
from thalweg.boundary import advance
from thalweg.storage import first_state
from thalweg.rules import LAMB, Kron
from thalweg.rules.noise import bits
from thalweg.settings import Handling, Settings
from thalweg.spaces import jax as xj, numpy as xn
assert not jax.config.jax_enable_x64
key = dict(seed=3, tensor=4000000000, t=7)
assert (np.asarray(bits(xj, jnp.zeros((5, 3)), **key)) == bits(xn, np.zeros((5, 3)), **key)).all()
traced = jax.jit(lambda t: bits(xj, jnp.zeros((5, 3)), **{**key, "t": t}))(7)
assert (np.asarray(traced) == bits(xn, np.zeros((5, 3)), **key)).all()
for dtype in ("float32", "bfloat16"):
    handling = Handling(rounding="stochastic")
    p = jnp.ones((6, 4), dtype)
    step = jax.jit(lambda p, s, t: advance(xj, Kron(), handling, p, p, s, t=t, lr=0.1, lr_scale=1.0, tensor=5)[:2])
    p, s = step(p, first_state(xj, Kron(), handling, p), 1)
    assert p.dtype == dtype and s["Q_1"].dtype == "float32" and (p < 1).all()
jax.jit(lambda decay: Settings(LAMB, {"weight_decay": decay, "betas": (decay, 0.9)}).validate_lr(decay) or decay)(0.1)
"""
    environment = {key: value for key, value in os.environ.items() if key != "JAX_ENABLE_X64"}
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
