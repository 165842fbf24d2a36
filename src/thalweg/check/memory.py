"""Memory: what grows, and what is kept."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from thalweg.check.problem import TorchSubject, give, tensors_of, train


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
    expired = [torch.UntypedStorage._expired(storage) for storage in storages]
    for storage in storages:
        torch.UntypedStorage._free_weak_ref(storage)
    if any(reference() is not None for reference in held) or not all(expired):
        pytest.fail("a gradient is alive after zero_grad()")


def test_everything_is_released(s: TorchSubject) -> None:
    """When an optimizer is dropped, so are its parameters: sweeps make hundreds in one process."""
    params, optimizer = s.begin()
    held = [weakref.ref(p) for p in params]
    del params, optimizer
    gc.collect()
    if any(reference() is not None for reference in held):
        pytest.fail("a parameter is alive after its optimizer was dropped")
