"""What checks expect: values that are equal to the bit, runs that go the same way, errors that say something."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from thalweg.check.problem import Shapes, TorchSubject, values


def same(actual: Any, wanted: Any, where: str, path: str = "") -> None:
    """Fail unless two values are of one kind and equal to the bit, within dicts, lists and tuples too.

    A list counts as a tuple. Objects that cannot be compared have to be of one class.
    """
    at = f"{where}: {path}" if path else where
    if isinstance(actual, Mapping) and isinstance(wanted, Mapping):
        if actual.keys() != wanted.keys():
            pytest.fail(f"{at}: {', '.join(sorted(map(str, actual.keys() ^ wanted.keys()))[:3])} is on one side only")
        for key in actual:
            same(actual[key], wanted[key], where, f"{path}.{key}" if path else str(key))
    elif isinstance(actual, (list, tuple)) and isinstance(wanted, (list, tuple)):
        if len(actual) != len(wanted):
            pytest.fail(f"{at} has {len(actual)} parts, not {len(wanted)}")
        for place, (one, other) in enumerate(zip(actual, wanted, strict=True)):
            same(one, other, where, f"{path}.{place}" if path else str(place))
    elif isinstance(actual, Tensor) and isinstance(wanted, Tensor):
        actual, wanted = on_host([actual, wanted])
        if actual.dtype != wanted.dtype or actual.shape != wanted.shape:
            pytest.fail(f"{at} is {describe(actual)}, not {describe(wanted)}")
        if not torch.equal(actual.nan_to_num(), wanted.nan_to_num()) or not torch.equal(actual.isnan(), wanted.isnan()):
            pytest.fail(f"{at} differs by up to {(actual.double() - wanted.double()).abs().max().item():.3g}")
    elif type(actual) is not type(wanted):
        pytest.fail(f"{at} is {describe(actual)}, not {describe(wanted)}")
    elif getattr(type(actual), "__eq__", None) is object.__eq__:  # an object that equals itself alone
        return
    elif actual != wanted and not (actual != actual and wanted != wanted):  # NaN is not itself
        pytest.fail(f"{at} is {actual!r}, not {wanted!r}")


def close(actual: Sequence[Tensor], wanted: Sequence[Tensor], start: Sequence[Tensor], where: str, rtol: float) -> None:
    """Fail unless two runs from the same start went the same way, up to a share of the way."""
    for place, (one, other, begin) in enumerate(zip(on_host(actual), on_host(wanted), on_host(start), strict=True)):
        way = (other.double() - begin.double()).norm().item()
        apart = (one.double() - other.double()).norm().item()
        rounding = torch.finfo(torch.float32).eps * other.double().norm().item()
        if not apart <= rtol * way + rounding:
            pytest.fail(f"{where}: tensor {place} is {apart:.3g} apart after a way of {way:.3g}")


def usual(
    s: TorchSubject,
    actual: Sequence[Tensor],
    steps: int,
    where: str,
    rtol: float | None = None,
    shapes: Shapes | None = None,
) -> None:
    """Fail unless parameters are where as many usual steps end: to the bit, or up to a share of the way."""
    wanted = usual_steps(s, tuple(s.shapes if shapes is None else shapes), steps)
    if rtol is None:
        same(actual, wanted, where)
    else:
        close(actual, wanted, s.weights(shapes=shapes), where, rtol)


@functools.lru_cache(maxsize=100)
def usual_steps(s: TorchSubject, shapes: Shapes, steps: int) -> list[Tensor]:
    """Where usual steps end, which many checks compare with."""
    return s.run_steps(shapes, steps)


def on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of whole tensors on the CPU, wherever they are, as those of a GPU or of several ranks."""
    return [tensor.cpu() for tensor in values(tensors)]


def changed(actual: Sequence[Tensor], usual: Sequence[Tensor], what: str) -> None:
    if all(map(torch.equal, actual, usual)):
        pytest.fail(f"{what} changes nothing")


def describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return f"{value!r:.80} ({type(value).__name__})"


def finite(params: Sequence[Tensor], where: str) -> None:
    for place, p in enumerate(params):
        if not p.isfinite().all():
            pytest.fail(f"{where}: parameter {place} has {int((~p.isfinite()).sum())} values that are not finite")


def moved(params: Sequence[Tensor], start: Sequence[Tensor], where: str) -> None:
    for place, (p, begin) in enumerate(zip(on_host(params), on_host(start), strict=True)):
        if p.numel() and torch.equal(p, begin):
            pytest.fail(f"{where}: parameter {place} {tuple(p.shape)} did not move")


def refused(action: Callable[[], Any], what: str, kinds: tuple[type[BaseException], ...] = (Exception,)) -> None:
    """Fail unless an action raises an error that says something."""
    try:
        action()
    except kinds as error:
        if not str(error).strip():
            pytest.fail(f"{what}: {type(error).__name__} without a word")
        return
    except Exception as error:
        pytest.fail(f"{what}: {type(error).__name__}, which is no {' or '.join(k.__name__ for k in kinds)}")
    pytest.fail(f"{what}: no error")
