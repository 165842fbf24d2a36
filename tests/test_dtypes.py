"""The one table of dtypes, held against the libraries that have them."""

from __future__ import annotations

import typing

import pytest

from thalweg.dtypes import DTYPES, NARROW, Name
from thalweg.spaces.numpy import named_dtype


def test_dtypes_are_what_the_table_says() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for name, known in DTYPES.items():
        limits = ml_dtypes.finfo(named_dtype(name))
        assert (named_dtype(name).itemsize, limits.nmant + 1, limits.minexp + 1) == tuple(known)
        assert (float(limits.eps), float(limits.smallest_normal)) == (known.rounding, 0.5 * 2.0**known.least)


def test_torch_has_them_under_the_same_names() -> None:
    torch = pytest.importorskip("torch")
    for name, known in DTYPES.items():
        found = getattr(torch, name)
        assert (found.itemsize, torch.finfo(found).eps) == (known.bytes, known.rounding)


def test_types_for_editors_name_every_dtype() -> None:
    assert typing.get_args(Name) == tuple(DTYPES)
    assert set(NARROW) == {name for name in DTYPES if DTYPES[name].bytes == 2}
