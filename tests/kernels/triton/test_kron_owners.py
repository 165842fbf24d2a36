"""Tables of Kron's kernels on gradients without parameters; tests/sharded/test_sharded_gpu_kron.py has ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from on_device import DEVICE
from tolerances import SPACE, TENSOR_CORES

from thalweg.kernels.triton.kron_owners import MOST_FORMULAS, Job, OwnerKernels
from thalweg.rules import Kron
from thalweg.rules.noise import normal, tensor_id
from thalweg.settings import Handling
from thalweg.spaces import torch as space
from thalweg.storage import first_state

pytestmark = pytest.mark.gpu  # by Triton's interpreter they take minutes

TOLERANCE = SPACE["float32"] if DEVICE == "cpu" else TENSOR_CORES["float32"]


class Both:
    """Two tensors of one shape, whitened by the kernels and by the rule."""

    def __init__(self, shape: tuple[int, ...], **options: Any) -> None:
        self.shape, self.rule = shape, Kron(**options).for_storage(None)
        self.generator = torch.Generator().manual_seed(0)
        self.names = ["a", "b"]
        self.factors = [self.first() for _ in self.names]
        self.expected = [self.first() for _ in self.names]
        self.kernels, self.t = OwnerKernels(), 0
        #: Whatever was given and answered: its memory is not used again.
        self.seen: list[Any] = []

    def first(self) -> dict[str, Any]:
        state = first_state(space, replace(self.rule, momentum=0.0), Handling(), torch.empty(self.shape, device=DEVICE))
        return {key: entry for key, entry in state.items() if key != "refresh"}

    def draw(self) -> list[torch.Tensor]:
        return [torch.randn(self.shape, generator=self.generator).to(DEVICE) for _ in self.names]

    def step(self, due: list[bool], *, averaged: bool = False) -> None:
        self.t += 1
        learned = self.draw()
        shown = self.draw() if averaged else learned
        before = [x.clone() for x in shown]
        job = Job(self.names, learned, shown, self.factors, self.rule, 5, self.t, due)
        [(h, squares)] = self.kernels.whitened([job])
        self.seen += [learned, shown, h]
        for i, name in enumerate(self.names):
            noise = normal(space, learned[i], seed=5, tensor=tensor_id(name), t=self.t)
            made = self.rule.transform(
                space, (before[i], learned[i]), self.expected[i], due=due[i], noise=lambda noise=noise: noise
            )
            self.expected[i] = made.state
            close(h[i], made.tensor)
            close(squares[i], made.figures["square"].flatten())
            for key, entry in self.expected[i].items():
                close(self.factors[i][key], entry)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max().item() <= TOLERANCE * wanted.abs().max().item()


def test_tables_are_kept_while_factors_stay_where_they_are() -> None:
    both = Both((9,), momentum_mode="ema")
    both.step([True, True], averaged=True)
    (known,) = both.kernels.known.values()
    places = dict(known.places)
    both.step([True, True], averaged=True)
    (again,) = both.kernels.known.values()
    assert again is known
    assert all(again.places[column] != before for column, before in places.items())
    both.factors = [{key: entry.clone() for key, entry in own.items()} for own in both.factors]
    both.step([True, True], averaged=True)
    (other,) = both.kernels.known.values()
    assert other is not known


def test_more_formulas_than_there_is_room_for() -> None:
    both, others = Both((9,)), Both((4, 5))
    others.kernels = both.kernels
    both.step([True, True])
    (numbers,) = both.kernels.numbers.values()
    numbers.known |= {-place: next(iter(numbers.known.values())) for place in range(1, MOST_FORMULAS)}
    others.step([True, True])
    assert both.kernels.age == 1  # recorded launches are not replayed
    both.step([True, False])
