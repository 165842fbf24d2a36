"""What a step must move in memory, and the matrix products that it needs.

Bytes moved are a floor: what has to be read from memory and written to it if tensors are larger than caches, each pass
over a tensor reading it anew, and passes being parted only by sums that must be complete. ``programs.budget`` finds it
for every rule but those that need whole tensors, whose products are counted by ``programs.footprint``.
"""

from __future__ import annotations

import re

from thalweg.dtypes import DTYPES
from thalweg.errors import RuleError
from thalweg.plan.items import Item
from thalweg.plan.models import Tensor
from thalweg.plan.optimizers import setting_of
from thalweg.programs import budget
from thalweg.programs.footprint import footprint
from thalweg.rules.entries import Entry, Factor, Spread
from thalweg.settings import Setting
from thalweg.storage import arithmetic

# ---- bytes in memory


def parameter_bytes(tensor: Tensor) -> int:
    """What holds a parameter, in any dtype: its name tells its bits, but for truth values.

    >>> [parameter_bytes(Tensor("w", (5,), dtype)) for dtype in ("uint8", "F4", "bfloat16", "BOOL")]
    [5, 3, 10, 5]
    """
    bits = re.search(r"\d+", tensor.dtype)
    return -(-tensor.elements * (int(bits.group()) if bits else 8) // 8)


#: Bytes of a parameter's count of steps, by front end; in JAX one count serves all.
COUNTERS = {"torch": 4, "numpy": 8, "optax": 0}


def counter_bytes(front_end: str, tensors: int, setting: Setting) -> int:
    """Counts of steps: one for each parameter, or in JAX one for all, and one more for steps left out; and norms."""
    guard = setting.handling.guard
    norms = 0 if guard is None else guard.kept_shape[0]
    if front_end == "optax":
        return 4 * (norms + (2 if setting.handling.on_nonfinite == "skip" else 1))
    return 8 * norms + COUNTERS[front_end] * tensors


# ---- bytes moved


def bytes_moved(optimizer: str | Setting, tensor: Tensor, *, refresh: bool = True) -> int:
    """What a step of one parameter must move at least.

    optimizer: a name such as "LAMB" or "AdamW", with its defaults, or a setting. refresh: whether Kron's factors are
    refreshed in this step.

    >>> matrix = Tensor("w", (4096, 4096))
    >>> [round(bytes_moved(name, matrix) / matrix.elements) for name in ("SGD", "AdamW", "LARS", "LAMB", "Adafactor")]
    [20, 28, 28, 40, 24]
    """
    setting = setting_of(optimizer) if isinstance(optimizer, str) else optimizer
    return bytes_moved_by(Item(tensor, setting), refresh=refresh)


def bytes_moved_by(item: Item, *, refresh: bool = True) -> int:
    tensor = item.tensor
    try:
        if not item.rule.needs_whole:
            return budget.bytes_moved(item.setting, item.shape, tensor.dtype, tensor.shape)
    except RuleError:  # a rule that cannot be traced has no passes either
        pass
    clipping = parameter_bytes(tensor) if item.setting.handling.needs_norm else 0
    return clipping + bytes_moved_by_products(item, refresh=refresh) + bytes_moved_by_applying(item)


def bytes_moved_by_products(item: Item, *, refresh: bool) -> int:
    """Operands and results of matrix products, each read or written once, and factors that are refreshed."""
    found = footprint(item.setting, item.tensor.shape, item.tensor.dtype, refresh=refresh)
    return found.product_bytes + (bytes_of_role(item, Factor) if refresh else 0)


def bytes_moved_by_applying(item: Item) -> int:
    """What is left when products are done: the preconditioned gradient, momentum and the parameter."""
    tensor = item.tensor
    p, h = parameter_bytes(tensor), tensor.elements * DTYPES[arithmetic(tensor.dtype)].bytes
    m = bytes_of_role(item, Spread)
    return (h + p + m) + (p + m)


def bytes_of_role(item: Item, role: type[Entry]) -> int:
    size = budget.sizes_of(item.setting, item.tensor.shape, item.tensor.dtype)
    return sum(size[key] for key in item.rule.keys(item.tensor.shape, role))


def flops(item: Item, *, refresh: bool = True) -> int:
    """Floating point operations of the matrix products of a step, two for each multiplication."""
    if not item.rule.needs_whole:
        return 0
    return footprint(item.setting, item.tensor.shape, item.tensor.dtype, refresh=refresh).flops
