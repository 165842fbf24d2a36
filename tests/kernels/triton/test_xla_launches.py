"""What calls from XLA would launch: interpreted, over buffers of the host, it is the rule's step."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import tolerances
import torch

import thalweg.torch
from thalweg import rules
from thalweg.kernels.triton import xla
from thalweg.kernels.triton.numbers import INTERPRETED
from thalweg.programs.host import function_of, options_of
from thalweg.rules.rule import stand_in
from thalweg.settings import RuleOptions
from thalweg.spaces import torch as space
from thalweg.storage import first_state

pytestmark = [
    pytest.mark.slow,  # programs are interpreted
    pytest.mark.skipif(not INTERPRETED.value, reason="kernels are compiled here, and not interpreted"),
]
STACKS = [(2, 30, 40), (2, 7), (2, 1, 2500)]
FACTORED = dict(min_dim_size_to_factor=8)


class Recorded:
    """The calls of a step of some parameters, run over tensors of the host as the handler runs them on a device."""

    def __init__(
        self, name: str, params: list[Any], options: dict[str, Any], *, observed: bool = False, wholes: Any = None
    ) -> None:
        setting = RuleOptions(rules.RULES[name], options, None, []).base
        self.rule, self.numerics = setting.stored_rule, setting.numerics
        dtype = str(params[0].dtype).removeprefix("torch.")
        first = [first_state(space, self.rule, self.numerics, p) for p in params]
        states = [{k: (tuple(x.shape), str(x.dtype).removeprefix("torch.")) for k, x in own.items()} for own in first]
        shapes, names = [tuple(p.shape) for p in params], [str(i) for i in range(len(params))]
        facts = names, shapes, (dtype, "float32"), states, 0.5, True, True, wholes
        described = xla.Parameters(stand_in(self.rule), self.numerics, *facts)
        self.found = xla.record(described, remember, observed=observed)
        self.results = [torch.zeros(shape, dtype=getattr(torch, dtype)) for shape, dtype in self.found.results]
        own = iter(self.results)
        self.params, self.states = [], []
        for p, state in zip(params, first, strict=True):
            self.params.append(next(own).copy_(p))
            self.states.append({key: next(own).copy_(entry) for key, entry in state.items()})
        self.count = 0

    def calls(self, grads: list[Any], lr: float) -> Iterator[int]:
        """One after the other. The scales of gradients, and of the rate, are undone by what they are given."""
        sign = -1.0 if self.numerics.maximize else 1.0
        numbers = [sign, *function_of(self.found.numbers)(options_of(self.rule))]
        singles = [torch.tensor([x], dtype=torch.float32) for x in (self.count, 2 * lr, 0.25)]
        fine = torch.ones(1, dtype=torch.int32)
        read = [*(4 * g for g in grads), torch.tensor(numbers), *singles]
        read += [fine] if self.numerics.on_nonfinite == "skip" else []
        memory = [*read, *(torch.frombuffer(table, dtype=TYPES[table.typecode]) for table in self.found.tables)]
        assert len(memory) == self.found.inputs
        memory += self.results
        table = [resolve(value, memory) for value in self.found.addresses]
        self.results[-1].view(torch.int64).copy_(torch.tensor(table, dtype=torch.int64))
        for number, call in enumerate(self.found.calls):
            for launch in call:
                run(launch, memory)
            yield number
            if self.numerics.on_nonfinite == "skip" and call is not self.found.calls[-1]:
                fine[0] = int(self.results[self.found.finite].all())
        self.count += int(fine)
        self.was_taken = bool(fine)

    def step(self, grads: list[Any], lr: float) -> bool:
        """Whether the step was taken."""
        for _ in self.calls(grads, lr):
            pass
        return self.was_taken


TYPES = {"i": torch.int32, "f": torch.float32}


def remember(kernel: Any, kinds: Any, constants: Any, warps: int) -> Any:
    return SimpleNamespace(kernel=kernel, kinds=kinds, constants=constants, warps=warps)


def resolve(value: int, memory: list[Any]) -> int:
    buffer, offset = divmod(value, 1 << 44)
    return int(memory[buffer - 1].data_ptr()) + offset if buffer else value


def run(launch: Any, memory: list[Any]) -> None:
    made = launch.kernel
    assert launch.threads == 32 * made.warps
    arguments = {}
    for (name, (kind, aligned)), (buffer, value) in zip(made.kinds.items(), launch.arguments, strict=True):
        if buffer == xla.NUMBER:
            arguments[name] = struct.unpack("<f", struct.pack("<i", value))[0] if kind == "fp32" else value
        else:
            own = memory[buffer].view(torch.int64) if kind == "*i64" else memory[buffer]
            assert aligned == (value % 16 == 0)
            arguments[name] = own.flatten()[value // own.element_size() :]
    made.kernel[launch.grid](**arguments, **made.constants)


def problem(shapes: list[Any], dtype: Any, steps: int) -> tuple[list[Any], list[list[Any]]]:
    made = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=made).to(dtype) for shape in shapes]
    return params, [[torch.randn(shape, generator=made) for shape in shapes] for _ in range(steps)]


@pytest.mark.parametrize(
    ("name", "options", "shapes", "dtype"),
    [
        pytest.param("LAMB", dict(exempt=None, on_nonfinite="skip"), STACKS, "float32", id="LAMB, guarded"),
        pytest.param("Adafactor", FACTORED, [(30, 40), (9, 20, 3)], "float32", id="Adafactor"),
        pytest.param("AdamW", dict(state_dtype="int8", maximize=True), [(64, 128)], "float32", id="AdamW, eight bits"),
        pytest.param("AdamW", dict(rounding="stochastic"), [(20, 30)], "bfloat16", id="AdamW, stochastic"),
        pytest.param("SGD", dict(momentum=0.9, averaged=0.9, cautious=True), STACKS[:2], "float32", id="SGD, averaged"),
    ],
)
def test_launches_take_the_step(name: str, options: dict[str, Any], shapes: list[Any], dtype: str) -> None:
    params, grads = problem(shapes, getattr(torch, dtype), 2)
    made = Recorded(name, params, options, observed=name == "LAMB")
    reference = {str(i): torch.nn.Parameter(p.clone()) for i, p in enumerate(params)}
    optimizer = getattr(thalweg.torch, name)(reference.items(), lr=0.1, engine="reference", **options)
    for g in grads:
        for p, own in zip(reference.values(), g, strict=True):
            p.grad = own.to(p.dtype) if p.dtype != torch.float32 else own
        optimizer.step()
        assert made.step([p.grad.float() for p in reference.values()], 0.1)
    for index, p in enumerate(reference.values()):
        state = optimizer.state[p]
        assert_close(made.params[index], p.detach())
        for key, entry in made.states[index].items():
            assert_close(entry, state[key])


def assert_close(found: Any, expected: Any) -> None:
    if found.dtype == torch.float32:
        assert (found - expected).abs().max() <= tolerances.FLOAT32 * expected.abs().max()
    else:
        assert (found != expected).float().mean() <= tolerances.FLIPPED


@pytest.mark.parametrize("name", ["LAMB", "Adafactor"])
def test_nothing_is_written_unless_all_is_finite(name: str) -> None:
    params, (good, bad) = problem([(30, 40), (9, 20)], torch.float32, 2)
    options = FACTORED if name == "Adafactor" else dict(exempt=None) if name == "LAMB" else {}
    made = Recorded(name, params, dict(on_nonfinite="skip", **options))
    bad[1][3, 4] = torch.inf
    assert made.step(good, 0.1)
    before = [x.clone() for x in made.results[: 2 + sum(map(len, made.states))]]
    assert not made.step(bad, 0.1)
    for x, old in zip(made.results, before, strict=False):
        assert torch.equal(x, old)
    assert made.step(good, 0.1)
    assert not torch.equal(made.results[0], before[0])


def test_sums_of_parts_are_completed_between_calls() -> None:
    params, grads = problem([(30, 40), (8, 6)], torch.float32, 2)
    whole = Recorded("LAMB", params, dict(exempt=None))
    wholes = [tuple(p.shape) for p in params]
    parts = [[p.chunk(2)[i] for p in params] for i in range(2)]
    devices = [Recorded("LAMB", own, dict(exempt=None), wholes=wholes) for own in parts]
    for g in grads:
        whole.step(g, 0.1)
        own = [[x.chunk(2)[i].contiguous() for x in g] for i in range(2)]
        for number, _ in zip(*(each.calls(mine, 0.1) for each, mine in zip(devices, own, strict=True)), strict=True):
            sums = devices[0].found.sums[number : number + 1]
            for result, first, end, axes in itertools.chain.from_iterable(sums):
                assert axes is None
                total = sum(each.results[result][..., first:end] for each in devices)
                for each in devices:
                    each.results[result][..., first:end] = total
    assert [len(own) for own in devices[0].found.sums] == [1]
    for index, p in enumerate(whole.params):
        assert_close(torch.cat([each.params[index] for each in devices]), p)
