"""Noise on GPUs has the numbers of ``rules.noise``."""

from __future__ import annotations

import numpy as np
import pytest
from on_device import DEVICE

torch = pytest.importorskip("torch")

from thalweg.kernels.triton.noise import draw_normal  # noqa: E402
from thalweg.rules.noise import normal, tensor_id  # noqa: E402
from thalweg.spaces import numpy as xp  # noqa: E402

pytestmark = pytest.mark.slow  # programs are interpreted

#: Of sqrt(-2 log u) cos(2 pi v), at most 5.8 large: its angle, its logarithm and the product are rounded to float32,
#: and functions of GPUs are off by a few units in the last place.
BOUND = 5.8 * 16 * 2.0**-23


@pytest.mark.parametrize("shape", [(7,), (40, 33), (3, 5, 2), (0, 4)])
def test_each_tensor_of_a_stack_has_its_own(shape: tuple[int, ...]) -> None:
    names = ["a", "layer.weight", "b"]
    ids = [tensor_id(name) for name in names]
    found = draw_normal(torch.full((3, *shape), 9.0, device=DEVICE), seed=-5, tensors=ids, t=2**31 + 7)
    for own, tensor in zip(found.cpu(), ids, strict=True):
        expected = normal(xp, np.zeros(shape, np.float64), seed=-5, tensor=tensor, t=2**31 + 7)
        np.testing.assert_allclose(own.double().numpy(), expected, rtol=0, atol=BOUND)
