"""Bytes, rates and times as people write them."""

from __future__ import annotations

import re

from thalweg.errors import CommandError


def parse_size(text: str, *, option: str) -> int:
    """Bytes, for the option that takes them. A bare number could mean anything, and is refused.

    >>> parse_size("80GB", option="--memory"), parse_size("16 GiB", option="--memory")
    (80000000000, 17179869184)
    """
    parts = re.fullmatch(r"(\d+(?:\.\d*)?)\s*(?:([KMGT])(I?)B?|B)", text.strip().upper())
    if parts is None or float(parts[1]) == 0:
        raise CommandError(f"{option} {text} must be a number with a unit, such as 80GB, 16GiB or, a second, 3.35TB/s")
    return round(float(parts[1]) * (1024.0 if parts[3] else 1000.0) ** " KMGT".index(parts[2] or " "))


def human_bytes(count: float) -> str:
    """Three digits and a decimal unit.

    >>> [human_bytes(n) for n in (0, 999, 1024, 124_439_808 * 8)]
    ['0 B', '999 B', '1.02 kB', '996 MB']
    """
    prefixes = ["", "k", "M", "G", "T"]
    while abs(count) >= 999.5 and len(prefixes) > 1:
        count, prefixes = count / 1000, prefixes[1:]
    return f"{count:.3g} {prefixes[0]}B" if prefixes[0] else f"{count:.0f} B"


def human_seconds(seconds: float) -> str:
    """Three digits, in seconds, milliseconds or microseconds.

    >>> [human_seconds(s) for s in (0, 2.5e-6, 0.0123, 1.5, 90)]
    ['0 s', '2.5 µs', '12.3 ms', '1.5 s', '90 s']
    """
    if seconds == 0 or seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds / 1e-3:.3g} ms" if seconds >= 1e-3 else f"{seconds / 1e-6:.3g} µs"


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
    """How many there are, with the word for one or for more.

    >>> count_words(1, "step"), count_words(2000, "step"), count_words(3, "run is", "runs are")
    ('1 step', '2,000 steps', '3 runs are')
    """
    return f"{count:,} {one if count == 1 else more or f'{one}s'}"
