"""What a call from XLA would launch: interpreted, over buffers of the host, it is the rule's step."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tolerances

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from thalweg import rules  # noqa: E402
from thalweg.kernels.triton import xla  # noqa: E402
from thalweg.kernels.triton.numbers import INTERPRETED  # noqa: E402
from thalweg.numpy import LAMB, AdamW  # noqa: E402
from thalweg.programs.host import function_of, options_of  # noqa: E402
from thalweg.programs.trace import stand_in  # noqa: E402

pytestmark = [
    pytest.mark.slow,  # programs are interpreted
    pytest.mark.skipif(not INTERPRETED.value, reason="kernels are compiled here, and not interpreted"),
]
SHAPES = {"w": (2, 30, 40), "b": (2, 7), "long": (2, 1, 2500)}


def resolve(value: int, memory: list[Any]) -> int:
    buffer, offset = divmod(value, 1 << 44)
    return int(memory[buffer - 1].data_ptr()) + offset if value else 0


@pytest.mark.parametrize(
    ("rule", "made", "options"),
    [
        (rules.LAMB, LAMB, dict(exempt=None, stacked_axes=1)),
        (rules.AdamW, AdamW, {}),
        pytest.param(rules.LAMB, LAMB, dict(exempt=None), marks=pytest.mark.nightly),
    ],
    ids=["LAMB, stacks", "AdamW", "LAMB"],
)
def test_launches_take_the_step(rule: Any, made: Any, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    options = dict(weight_decay=0.1, **options)
    params = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    grads = [{name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()} for _ in range(2)]
    reference = {name: p.copy() for name, p in params.items()}
    optimizer = made(lr=0.1, engine="reference", **options)
    for g in grads:
        optimizer.step(reference, g)

    own = rule(**options)
    keys = list(own.entries(SHAPES["w"]))
    dtypes = dict.fromkeys(["p", "g", *keys], "float32")
    described = xla.Parameters(stand_in(own), list(SHAPES), list(SHAPES.values()), dtypes, 0.5, 0, False, True, True)
    laid = xla.lay_out(described, xla.Launches(remember), observed=True)
    found, values, places, written, table, *_ = laid
    results = [torch.zeros(shape, dtype=getattr(torch, dtype)) for shape, dtype in laid.results]
    for index, name in enumerate(SHAPES):
        results[index * (1 + len(keys))].copy_(torch.from_numpy(params[name]))
    for t, g in enumerate(grads):
        numbers = [1.0, *function_of(laid.numbers)(options_of(own))]
        # the scale of gradients makes up for theirs, the rate for that of the learning rate
        singles = [torch.tensor([x]) for x in (float(t), 0.2, 0.25)]
        memory = [
            *results[:written],
            *(torch.from_numpy(g[name] * 4) for name in SHAPES),
            torch.tensor(numbers),
            *singles,
        ]
        memory += [torch.tensor(laid.chunks, dtype=torch.int32), torch.tensor(laid.begins, dtype=torch.int32)]
        memory += [torch.tensor(laid.counts, dtype=torch.float32), *results]
        assert memory[table] is results[-1]
        whole = list(values)
        for place in places:
            whole[place] = resolve(whole[place], memory)
        results[-1].view(torch.int64).copy_(torch.tensor(whole, dtype=torch.int64))
        for launch in found.launches:
            run(found, launch, memory)
    for index, name in enumerate(SHAPES):
        new = results[index * (1 + len(keys))].numpy()
        distance = np.abs(reference[name] - params[name]).max()
        assert np.abs(new - reference[name]).max() <= tolerances.FLOAT32 * distance
        for k, key in enumerate(keys):
            kept = optimizer.state[name][key]
            error = np.abs(results[index * (1 + len(keys)) + 1 + k].numpy() - kept).max()
            assert error <= tolerances.FLOAT32 * np.abs(kept).max()


def remember(kernel: Any, given: Any, constants: Any, warps: int) -> Any:
    return SimpleNamespace(kernel=kernel, given=given, constants=constants, warps=warps)


def run(found: Any, launch: Any, memory: list[Any]) -> None:
    place, threads, first, count, grid = launch
    made = found.kernels[place]
    assert threads == 32 * made.warps
    names = [name for name in made.kernel.arg_names if made.given.get(name) is not None]
    assert count == len(names)
    arguments = {}
    for name, (buffer, value) in zip(names, found.arguments[first : first + count], strict=True):
        kind = made.given[name][0]
        if buffer == xla.NUMBER:
            arguments[name] = struct.unpack("<f", struct.pack("<i", value))[0] if kind == "fp32" else value
        else:
            own = memory[buffer].view(torch.int64) if kind == "*i64" else memory[buffer]
            arguments[name] = own.flatten()[value // own.element_size() :]
    made.kernel[grid](**arguments, **made.constants)
