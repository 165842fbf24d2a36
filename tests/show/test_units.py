"""Sizes as people write them, and what is none."""

from __future__ import annotations

import pytest

from thalweg.errors import CommandError
from thalweg.show.units import parse_size


@pytest.mark.parametrize(
    ("text", "size"), [("512B", 512), ("1.5kB", 1500), ("2 kib", 2048), ("80G", 80 * 10**9), ("1TiB", 2**40)]
)
def test_sizes_have_decimal_and_binary_units(text: str, size: int) -> None:
    assert parse_size(text, option="--memory") == size


@pytest.mark.parametrize("text", ["", "80", "80.", "0GB", "-1GB", "80XB", "80GB/s", "many", "1..2GB", "80 i B"])
def test_what_is_no_size_is_refused_with_what_would_be_right(text: str) -> None:
    with pytest.raises(CommandError, match=r"--memory .* must be a number with a unit, such as 80GB, 16GiB"):
        parse_size(text, option="--memory")
