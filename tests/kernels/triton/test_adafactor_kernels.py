"""Kernels of Adafactor against their rule: tensors cut in every way. Over ranks: tests/sharded."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from lanes import once, one_in
from on_device import DEVICE
from tolerances import FUSED

from thalweg.boundary import advance
from thalweg.kernels.triton.cuts import MEASURING, STEPPING, Limits, cut_to_measure, matrices_of
from thalweg.kernels.triton.derived_tiles import TilePasses, passes_for
from thalweg.kernels.triton.launching import Compiled
from thalweg.kernels.triton.passes import Step
from thalweg.kernels.triton.rows import Operand
from thalweg.kernels.triton.statistics import copies_of, length_of
from thalweg.kernels.triton.uploads import Uploads
from thalweg.rules import Adafactor
from thalweg.rules.noise import tensor_id
from thalweg.settings import Handling
from thalweg.spaces import torch as xp
from thalweg.storage import first_state

pytestmark = pytest.mark.slow  # programs are interpreted

Tensors = list[torch.Tensor]
STEP = Step(0.1)
#: Every size is factored.
SMALL = Adafactor(min_dim_size_to_factor=0)
#: By what lies around the two largest axes, in rows that are short, long, and no multiple of what one load takes.
SHAPES = {
    "matrices": [(12, 140), (5, 2100), (6, 1031), (1, 1), (5, 0)],
    "before": [(3, 10, 30), (2, 5, 700)],
    "between": [(10, 3, 30), (5, 2, 700)],
    "behind": [(20, 30, 9), (9, 300, 2), (10, 80, 3, 3)],
    "far behind": [(12, 11, 40)],
    "all around": [(2, 12, 3, 20, 2)],
}


def random(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers whose size differs from row to row and from column to column."""
    numbers = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))
    for axis in range(len(shape)):
        numbers = numbers * torch.linspace(0.5, 2.0, shape[axis]).reshape([-1] + [1] * (len(shape) - 1 - axis))
    return numbers.to(DEVICE, dtype)


@dataclass
class Model:
    """Some parameters and their state, stepped by kernels."""

    params: Tensors
    rule: Adafactor = SMALL
    handling: Handling = field(default_factory=Handling)
    states: list[dict[str, torch.Tensor]] = field(default_factory=list)
    passes: Any = None
    #: How large tiles may be: as usual, unless said.
    limits: dict[str, Limits] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.states = self.states or [first_state(xp, self.rule, self.handling, p) for p in self.params]
        self.counts = [torch.zeros((), device=DEVICE) for _ in self.params]

    def made(self, grads: Tensors) -> Any:
        made = functools.partial(TilePasses, **self.limits) if self.limits else passes_for
        memory = dict(uploads=Uploads(torch.device(DEVICE)), compiled=Compiled())
        operands = [
            Operand(str(i), p, tuple(state.values()), count)
            for i, (p, state, count) in enumerate(zip(self.params, self.states, self.counts, strict=True))
        ]
        return made(operands, grads, self.rule, self.handling, tuple(self.states[0]), sharded=False, **memory)

    def step(self, grads: Tensors) -> None:
        if self.passes is None:
            self.passes = self.made(grads)
        self.passes.tables.follow(grads)
        for _ in self.passes.measure(STEP):
            pass
        self.passes.write(STEP)


@dataclass
class Reference(Model):
    """The same by the rule, in float64 where it is of float32, so that errors are those of kernels."""

    t: int = 0

    def step(self, grads: Tensors) -> None:
        self.t += 1
        for i, (p, g, state) in enumerate(zip(self.params, grads, self.states, strict=True)):
            wide = {"p": p, "g": g, **state}
            if p.dtype == torch.float32:
                wide = {key: value.double() for key, value in wide.items()}
            old, gradient = wide.pop("p"), wide.pop("g")
            facts = dict(t=self.t, lr=STEP.lr, lr_scale=STEP.lr_scale, tensor=tensor_id(str(i)))
            result = advance(xp, self.rule, self.handling, old, gradient, wide, **facts)
            self.params[i] = result.p.to(p.dtype)
            self.states[i] = {key: value.to(state[key].dtype) for key, value in result.state.items()}


def copied(model: Model) -> Reference:
    states = [{key: value.clone() for key, value in state.items()} for state in model.states]
    return Reference([p.clone() for p in model.params], model.rule, model.handling, states)


def assert_equal(ours: Model, theirs: Model, tolerance: float = FUSED["float32"]) -> None:
    for p, q, state, other in zip(ours.params, theirs.params, ours.states, theirs.states, strict=True):
        for name, mine, expected in [("p", p, q), *((key, state[key], other[key]) for key in other)]:
            assert mine.dtype == expected.dtype
            error = (mine.double() - expected.double()).abs().max() if mine.numel() else torch.zeros(())
            size = expected.double().abs().max() if mine.numel() else torch.ones(())
            assert error <= tolerance * size, (tuple(p.shape), name, float(error / size))


def small_tiles(**more: Any) -> dict[str, Limits]:
    """So small ones that all sums are of many."""
    few = dict(programs=1000, fewest_blocks=1, block=2048, deep_block=1024, widths=(1024, 512, 256))
    return dict(measuring=MEASURING._replace(**few, **more), stepping=STEPPING._replace(**few, **more))


@pytest.mark.nightly
@pytest.mark.parametrize("around", SHAPES)
@pytest.mark.parametrize(
    "limits",
    [{}, small_tiles(most_blocks=1, idle=0.9), small_tiles(most_blocks=3, idle=0.0)],
    ids=["usual", "wide", "narrow"],
)
def test_however_tensors_are_cut(around: str, limits: dict[str, Limits]) -> None:
    model = Model([random(shape, 1) for shape in SHAPES[around]], limits=limits)
    reference = copied(model)
    for seed in (2, 3):
        grads = [random(shape, seed) for shape in SHAPES[around]]
        model.step(grads)
        reference.step(grads)
    assert isinstance(model.passes, TilePasses)
    assert_equal(model, reference)


@pytest.mark.nightly
def test_many_copies_of_sums() -> None:
    few = MEASURING._replace(most_blocks=1, block=64, widths=(16,))
    model = Model([random((280, 40), 1)], limits=dict(measuring=few))
    reference = copied(model)
    grads = [random((280, 40), 2)]
    model.step(grads)
    reference.step(grads)
    copies = model.passes.statistics.tensors[0].tolist()
    assert 70 in copies, "more than are added at a time"
    assert 3 in copies
    assert_equal(model, reference)


@once(0)
@pytest.mark.parametrize("rule", [SMALL, Adafactor(factored=False)], ids=["factored", "all squares"])
def test_tensors_that_begin_anywhere(rule: Adafactor) -> None:
    """Loads of several elements need addresses that they divide, which views may not have."""

    def shifted(values: torch.Tensor) -> torch.Tensor:
        place = torch.empty(values.numel() + 1, dtype=values.dtype, device=values.device)[1:].view(values.shape)
        return place.copy_(values)

    model = Model([shifted(random((24, 64), 1))], rule)
    reference = copied(model)
    for gradient in (shifted(random((24, 64), 2)), random((24, 64), 3)):
        model.step([gradient])
        reference.step([gradient])
    assert_equal(model, reference)


@pytest.mark.nightly
def test_it_gives_the_same_bits_every_time() -> None:
    results = []
    for _ in range(2):
        model = Model([random(shape, 1) for shape in SHAPES["behind"]])
        model.step([random(shape, 2) for shape in SHAPES["behind"]])
        results.append(model)
    for first, second in zip(*(model.params for model in results), strict=True):
        assert torch.equal(first, second)


@once(2)
@pytest.mark.parametrize("what", [math.nan, math.inf, 1e25])
@pytest.mark.parametrize("shapes", [[(6, 8), (5, 300)], [(6, 8, 2), (5, 9, 3)]], ids=str)
def test_a_guard_leaves_one_tensor_as_it_was(shapes: list[tuple[int, ...]], what: float) -> None:
    model = Model([random(shape, 1) for shape in shapes], handling=Handling(on_nonfinite="skip"))
    before = copied(model)
    grads = [random(shape, 2) for shape in shapes]
    grads[1].view(-1)[7] = what
    model.step(grads)
    assert model.passes.finite.tolist() == [True, False]
    assert torch.equal(model.params[1], before.params[1])
    assert not torch.equal(model.params[0], before.params[0])
    assert [float(count) for count in model.counts] == [1, 0]
    for key, entry in before.states[1].items():
        assert torch.equal(model.states[1][key], entry)


@pytest.mark.parametrize("key", one_in(2, ["row_var", "col_var"]))
def test_a_guard_sees_state_that_float16_cannot_hold(key: str) -> None:
    """Beyond 65504, in one entry of one of the averages, of a gradient and a step that are finite."""
    handling = Handling(on_nonfinite="skip", state_dtype="float16")
    model = Model([random((20, 300), 1)], handling=handling)
    gradient = random((20, 300), 2)
    axis, place = {"row_var": (0, 17), "col_var": (1, 257)}[key]
    gradient.index_fill_(axis, torch.tensor([place], device=DEVICE), 300.0)
    model.step([gradient])
    wide = Model([random((20, 300), 1)], handling=Handling(on_nonfinite="skip"))
    wide.step([gradient])
    assert (model.passes.finite.tolist(), wide.passes.finite.tolist()) == ([False], [True])
    assert not any(entry.any() for entry in model.states[0].values())


# ---- memory


@pytest.mark.parametrize(
    "shapes",
    [
        [(50257, 768), (1024, 768), *[(2304, 768), (768, 768), (3072, 768), (768, 3072)] * 12],
        [(30522, 1024), *[(1024, 1024)] * 96, *[(4096, 1024), (1024, 4096)] * 24],
        [(128256, 2048), *[(2048, 2048), (512, 2048), (8192, 2048), (2048, 8192), (8192, 2048)] * 16],
    ],
    ids=["124 M", "335 M", "1.2 G"],
)
def test_sums_take_less_than_a_hundredth(shapes: list[tuple[int, int]]) -> None:
    model = Model([torch.empty(shape, device="meta") for shape in shapes[:1]])
    statistics = model.made(model.params).emitted.statistics
    cuts = cut_to_measure([matrices_of(shape, 0, 1) for shape in shapes])
    owners = [each for each in statistics if each.is_owner]
    sums = sum(length_of(own, each) * copies_of(own, each) for own in cuts for each in owners)
    assert sums < sum(map(math.prod, shapes)) / 100
