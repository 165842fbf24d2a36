"""Bytes, rates and times as people write them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from thalweg.errors import CommandError

DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
BINARY = {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_size(text: str, what: str = "a size", *, option: str = "") -> int:
    """Bytes: ``80GB``, ``16GiB``, ``512B``. ``option``: the one that takes it, for what is said of a bare number.

    >>> parse_size("80GB"), parse_size("16 GiB"), parse_size("512B")
    (80000000000, 17179869184, 512)
    """
    return round(parse_quantity(text, ("B",), f"{what} such as 80GB or 16GiB", ("GiB", "GB"), option=option))


def parse_rate(text: str, what: str = "a bandwidth", *, option: str = "") -> float:
    """Bytes a second: ``3.35TB/s``.

    >>> parse_rate("3.35TB/s")
    3350000000000.0
    """
    return parse_quantity(text, ("B/S", "B"), f"{what} such as 3.35TB/s", ("TB/s", "GB/s"), option=option)


def parse_quantity(text: str, units: Sequence[str], wanted: str, likely: Sequence[str], *, option: str = "") -> float:
    """A number with a unit, or with a prefix alone: ``80G``. A bare number could mean anything, and is refused.

    units: in capitals; wanted: what it should have been; likely: units that a bare number may have been meant in.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:E[+-]?\d+)?)\s*([A-Z/]*)\s*", text.upper())
    factors = DECIMAL | BINARY
    prefix = found.group(2) if found else ""
    if found and not prefix:
        asked = f"{option} " if option else ""
        number = text.strip()
        meant = " or ".join(f"{asked}{number}{unit}" for unit in likely)
        raise CommandError(f"{asked}{number} has no unit: it must be {wanted}; say {meant}")
    prefix = prefix.removesuffix(next((unit for unit in units if prefix.endswith(unit)), ""))
    if found is None or prefix not in factors or not float(found.group(1)) > 0:
        raise CommandError(f"{text!r} is not {wanted}")
    return float(found.group(1)) * factors[prefix]


def human_bytes(count: float) -> str:
    """Three digits and a decimal unit.

    >>> [human_bytes(n) for n in (0, 999, 1024, 124_439_808 * 8)]
    ['0 B', '999 B', '1.02 kB', '996 MB']
    """
    count, prefix = scale_down(count, ("", "k", "M", "G", "T"))
    return f"{count:.3g} {prefix}B" if prefix else f"{count:.0f} B"


def scale_down(count: float, prefixes: Sequence[str]) -> tuple[float, str]:
    """A number below a thousand, and the prefix of its unit. prefixes: of a thousand times more each."""
    for prefix in prefixes:
        if abs(count) < 999.5 or prefix == prefixes[-1]:
            break
        count /= 1000
    return count, prefix


def human_seconds(seconds: float) -> str:
    """
    >>> [human_seconds(s) for s in (0, 2.5e-6, 0.0123, 1.5, 90)]
    ['0 s', '2.5 µs', '12.3 ms', '1.5 s', '90 s']
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size or unit == "µs":
            break
    return f"{seconds / size:.3g} {unit}" if seconds else "0 s"


def short_number(value: float | None, digits: int = 3) -> str:
    """A few digits; powers of ten for what is very small or very large; a dash for what is not there.

    >>> [short_number(x) for x in (0, 0.05, 12345.6, 8.38e-5, 1e200, -1e-3, None)]
    ['0', '0.05', '12,346', '8.38×10⁻⁵', '10²⁰⁰', '-0.001', '–']
    """
    if value is None:
        return "–"
    size = abs(value)
    if size == 0 or 1e-3 <= size < 1e6:
        rounded = round(value) if size >= 1000 else float(f"{value:.{digits}g}")
        return f"{rounded:,.10f}".rstrip("0").rstrip(".")
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    power = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{power}" if float(mantissa) == 1 else f"{float(mantissa):g}×10{power}"


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def count_words(count: int, one: str, more: str = "") -> str:
    """
    >>> count_words(1, "step"), count_words(2000, "step"), count_words(3, "run is", "runs are")
    ('1 step', '2,000 steps', '3 runs are')
    """
    return f"{count:,} {one if count == 1 else more or f'{one}s'}"
