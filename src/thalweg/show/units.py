"""Bytes, rates and times as people write them."""

from __future__ import annotations

import re

from thalweg.errors import CommandError

DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
BINARY = {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_size(text: str, what: str = "a size") -> int:
    """Bytes: ``80GB``, ``16GiB``, ``1.5e9``.

    >>> parse_size("80GB"), parse_size("16 GiB"), parse_size("512")
    (80000000000, 17179869184, 512)
    """
    return round(parse_quantity(text, "B", f"{what} such as 80GB or 16GiB"))


def parse_rate(text: str, what: str = "a bandwidth") -> float:
    """Bytes a second: ``3.35TB/s``.

    >>> parse_rate("3.35TB/s")
    3350000000000.0
    """
    return parse_quantity(text, "B/S", f"{what} such as 3.35TB/s")


def parse_quantity(text: str, unit: str, wanted: str) -> float:
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:E[+-]?\d+)?)\s*([A-Z/]*)\s*", text.upper())
    factors = DECIMAL | BINARY
    prefix = found.group(2).removesuffix(unit).removesuffix("B") if found else ""
    if found is None or prefix not in factors or not float(found.group(1)) > 0:
        raise CommandError(f"{text!r} is not {wanted}")
    return float(found.group(1)) * factors[prefix]


def human_bytes(count: float) -> str:
    """Three digits and a decimal unit.

    >>> [human_bytes(n) for n in (0, 999, 1024, 124_439_808 * 8)]
    ['0 B', '999 B', '1.02 kB', '996 MB']
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 999.5 or unit == "TB":
            break
        count /= 1000
    return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"


def human_seconds(seconds: float) -> str:
    """
    >>> [human_seconds(s) for s in (0, 2.5e-6, 0.0123, 1.5, 90)]
    ['0 s', '2.5 µs', '12.3 ms', '1.5 s', '90 s']
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size or unit == "µs":
            break
    return f"{seconds / size:.3g} {unit}" if seconds else "0 s"
