"""The one table of dtypes, held against the libraries that have them."""

from __future__ import annotations

import typing

import pytest

from thalweg.dtypes import DTYPES, NARROW, Name
from thalweg.spaces.numpy import named_dtype


@pytest.mark.parametrize("name", DTYPES)
def test_a_dtype_is_what_the_table_says(name: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    found = named_dtype(name)
    limits = ml_dtypes.finfo(found)
    assert (found.itemsize, limits.nmant + 1, limits.minexp + 1) == tuple(DTYPES[name])
    assert float(limits.eps) == DTYPES[name].rounding
    assert float(limits.smallest_normal) == 0.5 * 2.0 ** DTYPES[name].least


@pytest.mark.parametrize("name", DTYPES)
def test_torch_has_it_under_the_same_name(name: str) -> None:
    torch = pytest.importorskip("torch")
    assert getattr(torch, name).itemsize == DTYPES[name].bytes
    assert torch.finfo(getattr(torch, name)).eps == DTYPES[name].rounding


def test_types_for_editors_name_every_dtype() -> None:
    assert typing.get_args(Name) == tuple(DTYPES)
    assert set(NARROW) == {name for name in DTYPES if DTYPES[name].bytes == 2}
