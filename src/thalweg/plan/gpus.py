"""What fused kernels for GPUs step, and the memory that they need: what is said here follows ``engines/triton.py``.

They work in place. What they need are tables of where everything is and sums on their way, and for Kron's products room
for operands and results; all of it is kept from step to step. That there is Triton where steps are taken is assumed.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from thalweg.arrays import Shape
from thalweg.plan.items import Entry, Item, state_entries
from thalweg.plan.models import Tensor
from thalweg.rules import Kron
from thalweg.settings import Setting

#: Rules that have kernels, and the dtypes of parameters, state and Kron's factors that these read and write.
RULES = ("LARS", "LAMB", "Adafactor", "Kron")
DTYPES = ("float32", "bfloat16", "float16")
FACTORS = ("float32", "bfloat16")
#: CUDA's memory is given out in multiples of this.
BLOCK = 512
#: Elements of tensors that are laid out together, about: tables of larger models would fill memory here.
MOST_AT_ONCE = 2**29
#: Elements that torch's norms of a list of tensors add up in one piece.
NORMED = 2**16
#: Where kernels cannot be asked, what they keep is taken to be one in so many bytes of the parameters in float32. For
#: Kron: so many times a parameter and its factors, of one shape as many together as this memory holds.
SHARE, KRON_SHARE, KRON_TOGETHER = 1 / 200, 2.5, 256 * 2**20


class Shown(NamedTuple):
    """A parameter, or what a rank holds of it, as kernels are shown it."""

    shape: Shape
    dtype: str
    state: Mapping[str, Entry]
    #: Of the whole parameter, if it is sharded.
    whole: Shape | None = None

    def bytes_of_products(self) -> int:
        """In float32, of the parameter and its factors."""
        factors = sum(math.prod(shape) for key, (shape, _) in self.state.items() if key.startswith("Q_"))
        return 4 * (math.prod(self.shape) + factors)


def shown(item: Item) -> Shown:
    return Shown(item.tensor.shape, item.tensor.dtype, state_entries(item.setting, item.tensor))


#: Parameters that kernels step together, and what holds for them.
Bucket = tuple[Setting, Sequence[Shown]]


def reason_against(setting: Setting, tensor: Tensor) -> str:
    """Why fused kernels cannot step a parameter on a GPU, "" if they can."""
    rule = type(setting.rule).__name__
    if rule not in RULES:
        return f"there is no fused kernel of {rule} for GPUs"
    if tensor.dtype not in DTYPES:
        return f"there is no fused kernel for {tensor.dtype} on GPUs"
    state = state_entries(setting, tensor)
    if any(dtype not in DTYPES for key, (_, dtype) in state.items() if key != "refresh"):
        return "there is no fused kernel for state of float64 on GPUs"
    return reason_against_kron(setting, tensor, state["Q_0"][1]) if isinstance(setting.rule, Kron) else ""


def reason_against_kron(setting: Setting, tensor: Tensor, factors: str) -> str:
    """The same for Kron alone (``kernels/triton/kron_batch.py``); factors: the dtype in which they are kept."""
    rule = setting.rule_at(1)
    assert isinstance(rule, Kron)
    if rule.geometry == "eq":
        return "there is no fused kernel for geometry='eq', which solves triangular systems"
    if rule.damping_mode == "expected":
        return "there is no fused kernel for damping_mode='expected'"
    if setting.handling.on_nonfinite == "raise":
        return "there is no fused kernel of Kron for on_nonfinite='raise'"
    if factors not in FACTORS:
        return f"there is no fused kernel for factors stored in {factors}"
    sizes = rule.sizes(tensor.shape)
    if len(sizes) > 2:
        return f"there is no fused kernel for {len(sizes)} factors"
    if tensor.elements == 0:
        return "it has no elements"
    dense = [size for size, diagonal in zip(sizes, rule.diagonals(sizes), strict=True) if not diagonal]
    if max(math.prod(size + 64 for size in sizes), *((size + 64) ** 2 for size in dense), 0) >= 2**31:
        return "it has too many elements for 32-bit positions"
    return ""


def reason_against_parts(setting: Setting) -> str:
    """Why fused kernels cannot step parts of parameters on a GPU, or whole ones for their owners, "" if they can."""
    if setting.rule.stacked_axes and not setting.rule.needs_whole:
        return "parameters are sharded, and GPU kernels step shards only with stacked_axes=0"
    return ""


# ---- memory


def scratch_bytes(buckets: Sequence[Bucket]) -> int:
    """What kernels keep from step to step: they say so themselves where torch and Triton are installed."""
    if not buckets:
        return 0
    if any(importlib.util.find_spec(name) is None for name in ("torch", "triton")):
        return estimated(buckets)
    from thalweg.torch.engines import triton_memory as scratch

    return scratch.scratch_bytes(
        [
            (replace(setting, rule=setting.rule_at(1)), some)
            for setting, bucket in buckets
            for some in laid_out_together(setting, bucket)
        ]
    )


def estimated(buckets: Sequence[Bucket]) -> int:
    """The same without asking."""
    total, shared = 0.0, 0.0
    for setting, bucket in buckets:
        if isinstance(setting.rule, Kron):
            needed = KRON_SHARE * bucket[0].bytes_of_products()
            shared = max(shared, needed * min(len(bucket), max(1, KRON_TOGETHER // needed)))
        else:
            total += SHARE * 4 * sum(math.prod(one.shape) for one in bucket)
    return round(total + shared)


def laid_out_together(setting: Setting, bucket: Sequence[Shown]) -> Iterator[Sequence[Shown]]:
    """Pieces of about equal size, each of whole tensors. Kron's tables are small."""
    *starts, total = itertools.accumulate((math.prod(one.shape) for one in bucket), initial=0)
    pieces = 1 if isinstance(setting.rule, Kron) else max(1, -(-total // MOST_AT_ONCE))
    # tensors without elements at the end belong to the last piece
    numbers = [min(start * pieces // max(1, total), pieces - 1) for start in starts]
    for _, some in itertools.groupby(zip(numbers, bucket, strict=True), lambda pair: pair[0]):
        yield [one for _, one in some]


def joint_bytes(buckets: Sequence[Sequence[Item]]) -> int:
    """What it takes to know the joint norm of all gradients before a step, list after list; 0 if no option needs it."""
    handlings = [bucket[0].setting.handling for bucket in buckets]
    if not any(handling.max_grad_norm is not None or handling.on_nonfinite == "skip" for handling in handlings):
        return 0
    # a number for each piece of each tensor, as if all had as many as the largest, and then one for each tensor
    pieces = [max(-(-item.tensor.elements // NORMED) for item in bucket) for bucket in buckets]
    return max(rounded_up(4 * len(b) * most) + BLOCK * len(b) for b, most in zip(buckets, pieces, strict=True))


def rounded_up(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
