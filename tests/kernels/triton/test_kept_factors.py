"""What is made of factors and kept from step to step is made anew when somebody writes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from on_device import agree_in_products, gradients, parameters

import thalweg.torch

pytestmark = pytest.mark.slow  # programs are interpreted

SHAPES = {"a": (24, 12), "b": (24, 12), "c": (40,), "d": (50, 8)}
#: So that kernels do what goes element by element, and stacks of tensors the rest.
IN_PARTS: dict[str, Any] = dict(precond_precision="float32", precond_update_probability=0.3)


@pytest.mark.parametrize("options", [{}, dict(block_size=8), dict(state_dtype="bfloat16")], ids=str)
def test_factors_that_the_user_writes_are_those_of_the_next_step(options: dict[str, Any]) -> None:
    results: list[Any] = []
    for engine in ("fused", "reference"):
        named = parameters(shapes=SHAPES)
        optimizer = thalweg.torch.Kron(named, 0.02, engine=engine, **IN_PARTS, **options)
        for t, step in enumerate(gradients(8, shapes=SHAPES)):
            for name, p in named:
                p.grad = step[name]
            if t == 5:
                with torch.no_grad():
                    optimizer.state[named[0][1]]["Q_0"].mul_(1.5)
            if t == 6:
                optimizer.load_state_dict(optimizer.state_dict())
            optimizer.step()
        assert optimizer.engine == engine
        results += [optimizer, named]
    agree_in_products(*results)
