"""Memory: what grows, what is kept, what a step needs for its time."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from thalweg.check.problem import TorchSubject, give, leaves, tensors_of, train


class Allocations(TorchDispatchMode):
    """The bytes of tensors made within it that live at the same time, at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {leaf.untyped_storage()._cdata for leaf in tensors_in((args, kwargs or {}))}
        found = function(*args, **(kwargs or {}))
        for leaf in tensors_in(found):
            storage = leaf.untyped_storage()
            if storage._cdata not in before and storage._cdata not in self.known:
                self._count(storage)
        return found

    def _count(self, storage: Any) -> None:
        size, key = storage.nbytes(), storage._cdata
        self.known.add(key)
        self.now += size
        self.most = max(self.most, self.now)

        def gone() -> None:
            self.known.discard(key)
            self.now -= size

        weakref.finalize(storage, gone)


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for _, leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


def test_state_does_not_grow(s: TorchSubject) -> None:
    """State takes as many bytes after twelve steps as after three."""
    params, optimizer = s.begin()
    before = sum(leaf.nbytes for leaf in tensors_of(optimizer).values())
    train(optimizer, params, 9, first=3)
    after = sum(leaf.nbytes for leaf in tensors_of(optimizer).values())
    if after > before:
        pytest.fail(f"the state had {before} bytes and has {after}")


def test_gradients_are_released(s: TorchSubject) -> None:
    """After zero_grad() nothing holds the gradients: they are as large as the model."""
    params, optimizer = s.make_fresh()
    for t in range(2):
        give(params, t)
        held = [weakref.ref(p.grad) for p in params if p.grad is not None]
        storages = [p.grad.untyped_storage()._weak_ref() for p in params if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    gc.collect()
    expired = [torch.UntypedStorage._expired(each) for each in storages]
    for each in storages:
        torch.UntypedStorage._free_weak_ref(each)
    if any(each() is not None for each in held) or not all(expired):
        pytest.fail("a gradient is alive after zero_grad()")


def test_everything_is_released(s: TorchSubject) -> None:
    """When an optimizer is dropped, so are its parameters: sweeps make hundreds in one process."""
    params, optimizer = s.begin()
    held = [weakref.ref(each) for each in params]
    del params, optimizer
    gc.collect()
    if any(each() is not None for each in held):
        pytest.fail("a parameter is alive after its optimizer was dropped")


def test_temporaries(s: TorchSubject) -> None:
    """Declared: a step needs no more memory for its time than this multiple of the parameters."""
    s.require("temporaries")
    shapes = [(64, 64)] * 4
    params, optimizer = s.make_fresh(shapes=shapes)
    train(optimizer, params, 2)
    give(params, 2)
    gc.collect()
    with Allocations() as seen:
        optimizer.step()
    share = seen.most / sum(p.nbytes for p in params)
    if share > (s.facts.temporaries or 0.0):
        pytest.fail(f"{share:.1f} times the parameters' bytes at once, above {s.facts.temporaries}")
