"""Adafactor on GPUs: which passes serve a list of parameters."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from thalweg.kernels.triton.adafactor_factored import FactoredPasses
from thalweg.kernels.triton.adafactor_plain import PlainPasses
from thalweg.kernels.triton.passes import Passes
from thalweg.kernels.triton.tables import Operand
from thalweg.rules import Adafactor
from thalweg.settings import Handling


def passes_for(operands: Sequence[Operand], grads: Sequence[Tensor], rule: Adafactor, handling: Handling) -> Passes:
    """The passes over parameters of one kind: all are factored over the same two axes, or none is."""
    whole = operands[0].shape or tuple(operands[0].p.shape)
    kind = PlainPasses if rule.factored_axes(whole) is None else FactoredPasses
    return kind(operands, grads, rule, handling)
