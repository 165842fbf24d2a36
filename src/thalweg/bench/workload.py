"""The tensors that are stepped: random numbers in the shapes of a model, for each framework in its own memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from thalweg.dtypes import DTYPES
from thalweg.plan.models import Model
from thalweg.show.devices import Device

if TYPE_CHECKING:
    from torch import Tensor

#: So many random numbers, over and over. A prime, so that no two rows of a matrix are alike.
PERIOD = 1_048_573
PARAMETER, GRADIENT = 2e-2, 1e-2
#: Sets of gradients. Each step takes the other one, so that addresses differ from those of the step before.
SETS = 2


class Workload:
    """A model's parameters, new for each contestant, and gradients that all contestants of a framework share."""

    def __init__(self, model: Model, device: Device, dtype: str = "float32") -> None:
        self.model, self.device, self.dtype = model.stored_as(dtype), device, dtype
        self.names = [tensor.name for tensor in model.tensors]
        #: Where the largest tensor stands.
        self.largest = max(range(len(model.tensors)), key=lambda index: model.tensors[index].elements)
        self.itemsize = DTYPES[dtype].bytes
        self._grads: dict[str, list[Any]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters, and of a set of gradients."""
        return self.itemsize * self.model.parameters

    def params(self, framework: str) -> Any:
        """New parameters: by name for numpy, in a list for torch and jax."""
        return self._make(framework, 0, PARAMETER)

    def grads(self, framework: str) -> list[Any]:
        """The sets of gradients; JAX, whose arrays stay where they are, has one."""
        if framework not in self._grads:
            sets = range(1 if framework == "jax" else SETS)
            self._grads[framework] = [self._make(framework, 1, GRADIENT) for _ in sets]
        return self._grads[framework]

    def _make(self, framework: str, seed: int, scale: float) -> Any:
        arrays = self._arrays(seed, scale)
        if framework == "numpy":
            return dict(zip(self.names, arrays, strict=True))
        if framework == "torch":
            return [self._tensor(array) for array in arrays]
        import jax

        device = self.device.find_in_jax()
        return [jax.device_put(array, device, may_alias=False) for array in arrays]

    def _arrays(self, seed: int, scale: float) -> Iterator[Any]:
        numbers = np.random.default_rng(seed).normal(0.0, scale, PERIOD).astype(np.float32).astype(self._numpy_dtype)
        for tensor in self.model.tensors:
            yield repeat(numbers, tensor.shape)

    @property
    def _numpy_dtype(self) -> Any:
        if self.dtype == "float32":
            return np.float32
        import ml_dtypes

        return ml_dtypes.bfloat16

    def _tensor(self, array: Any) -> Tensor:
        """A tensor in torch's own memory, which is aligned as its kernels like it."""
        import torch

        if self.dtype == "bfloat16":  # torch does not know ml_dtypes'
            return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16).to(self.device.name, copy=True)
        return torch.from_numpy(array).to(self.device.name, copy=True)


def repeat(numbers: Any, shape: tuple[int, ...]) -> Any:
    """Fill new memory of that shape with the numbers, as often as it takes."""
    array = np.empty(shape, numbers.dtype)
    flat = array.reshape(-1)
    for start in range(0, flat.size, len(numbers)):
        rest = flat[start : start + len(numbers)]
        rest[:] = numbers[: rest.size]
    return array
