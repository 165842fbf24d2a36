"""What a step must move in memory and send to other ranks.

Bytes moved are a floor: what has to be read from memory and written to it if tensors are larger than caches, each pass
over a tensor reading it anew, and passes being parted only by sums that must be complete. ``programs.budget`` finds it
for every rule but Kron, whose products are counted here. Bytes sent are counted for
the collectives that a step needs beyond those of the gradients, which are not counted: sums in ``parts``, Kron's
messages in ``owners``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from thalweg.arrays import Shape
from thalweg.dtypes import DTYPES
from thalweg.errors import RuleError
from thalweg.plan.models import Tensor
from thalweg.plan.optimizers import setting_of
from thalweg.programs import budget
from thalweg.programs.liveness import products_of
from thalweg.rules.entries import Entry as Declared
from thalweg.rules.entries import Factor, Spread
from thalweg.settings import Setting
from thalweg.storage import arithmetic

# ---- bytes in memory


def parameter_bytes(tensor: Tensor) -> int:
    return tensor.elements * DTYPES[tensor.dtype].bytes


def frozen_bytes(tensors: Iterable[Tensor]) -> int:
    """Weights that are held and not trained, in any dtype: its name tells its bits, but for truth values.

    >>> frozen_bytes([Tensor("a", (3,), "uint8"), Tensor("b", (5,), "F4"), Tensor("c", (2,), "bfloat16")])
    10
    """
    total = 0
    for tensor in tensors:
        bits = re.search(r"\d+", tensor.dtype)
        total += -(-tensor.elements * (int(bits.group()) if bits else 8) // 8)
    return total


def counter_bytes(front_end: str, tensors: int, setting: Setting) -> int:
    """Counts of steps: one for each parameter, or in JAX one for all, and one more for steps left out."""
    if front_end == "optax":
        return 4 * (2 if setting.handling.on_nonfinite == "skip" else 1)
    return {"torch": 4, "numpy": 8}[front_end] * tensors


# ---- bytes moved


def bytes_moved(optimizer: str | Setting, tensor: Tensor, *, refresh: bool = True, whole: Shape | None = None) -> int:
    """What a step of one parameter must move at least.

    optimizer: a name such as "LAMB" or "AdamW", with its defaults, or a setting. refresh: whether Kron's factors are
    refreshed in this step. whole: the shape of the whole parameter, if the tensor is a shard of it.

    >>> matrix = Tensor("w", (4096, 4096))
    >>> [round(bytes_moved(name, matrix) / matrix.elements) for name in ("SGD", "AdamW", "LARS", "LAMB", "Adafactor")]
    [20, 28, 28, 40, 24]
    """
    setting = setting_of(optimizer) if isinstance(optimizer, str) else optimizer
    try:
        if not setting.rule.needs_whole:
            return budget.bytes_moved(setting, whole or tensor.shape, tensor.dtype, tensor.shape)
    except RuleError:  # nor is it known in passes what another rule does that no machine can read
        pass
    clipping = parameter_bytes(tensor) if setting.handling.max_grad_norm is not None else 0
    return clipping + moved_by_products(setting, tensor, refresh=refresh) + moved_by_applying(setting, tensor)


def moved_by_products(setting: Setting, tensor: Tensor, *, refresh: bool) -> int:
    """Operands and results of Kron's matrix products, each read or written once, and factors that are refreshed."""
    factors = bytes_of_role(setting, tensor, Factor)
    return products_of(setting, tensor.shape, tensor.dtype, refresh).bytes + (factors if refresh else 0)


def moved_by_applying(setting: Setting, tensor: Tensor) -> int:
    """What is left for Kron when its products are done: the preconditioned gradient, momentum and the parameter."""
    p, h = parameter_bytes(tensor), tensor.elements * DTYPES[arithmetic(tensor.dtype)].bytes
    m = bytes_of_role(setting, tensor, Spread)
    return (h + p + m) + (p + m)


def bytes_of_role(setting: Setting, tensor: Tensor, role: type[Declared]) -> int:
    size = budget.sizes_of(setting, tensor.shape, tensor.dtype)
    return sum(size[key] for key in setting.rule_at(1).keys(tensor.shape, role))


def flops(setting: Setting, tensor: Tensor, *, refresh: bool = True) -> int:
    """Floating point operations of the matrix products of a step, two for each multiplication."""
    return products_of(setting, tensor.shape, tensor.dtype, refresh).flops if setting.rule.needs_whole else 0


# ---- bytes sent


def shard(size: int, world: int, rank: int) -> int:
    """How much of an axis a rank has: whole chunks of ceil(size / world), as torch.chunk cuts them."""
    chunk = -(-size // world)
    return max(0, min(chunk, size - rank * chunk))


def local(tensor: Tensor, world: int, rank: int) -> Tensor:
    """A rank's part of a parameter; tensors without axes are everywhere."""
    if not tensor.shape:
        return tensor
    return Tensor(tensor.name, (shard(tensor.shape[0], world, rank), *tensor.shape[1:]), tensor.dtype)


def ring(total: int, world: int) -> int:
    """What each rank sends in a ring that sums so many bytes over all ranks."""
    return round(2 * (world - 1) / world * total)
