"""One colour for each optimizer, in every picture and table."""

from __future__ import annotations

import colorsys
import zlib
from collections.abc import Sequence

TONES = ("paper", "raised", "ink", "quiet", "faint", "strong", "notice", "best", "valley", "slope", "height", "contour")
#: By Okabe and Ito, whose colours the colour-blind tell apart too; baselines are grey.
COLOURS = {
    "SGD": "#858585",
    "AdamW": "#2b2b2b",
    "AdEMAMix": "#5f7d00",
    "MARS": "#8c564b",
    "LARS": "#e69f00",
    "LAMB": "#0072b2",
    "Adafactor": "#009e73",
    "Muon": "#6a3d9a",
    "Lion": "#c2185b",
    "Kron": "#d55e00",
    "SOAP": "#3d7a85",
}
#: For those of other libraries, in the order they come; after the last, the first again.
RIVALS = ("#cc79a7", "#56b4e9", "#8c6d31", "#7b4173", "#b5a800", "#393b79")
#: Lightness and saturation of rules that have no colour here.
OTHERS = (0.4, 0.55)
#: Viridis, which the colour-blind can read.
VIRIDIS = ("#440154", "#414487", "#2a788e", "#22a884", "#7ad151", "#fde725")
#: The tones of pages, light and dark, and of pictures; those of a map are the last four.
THEMES: dict[str, dict[str, str]] = {
    theme: dict(zip(TONES, colours.split(), strict=True))
    for theme, colours in {
        "light": "#ffffff #f6f6f4 #23262b #666b73 #e6e6e2 #c9cac6 #fdf4dc #eef4ea #c9cac6 #e6e6e2 #ffffff #c9cac6",
        "dark": "#15171b #1e2126 #eaebe9 #a0a5ad #2c3037 #474c55 #362f1c #223026 #474c55 #2c3037 #15171b #474c55",
        "picture": "#ffffff #f6f6f4 #333333 #777777 #e4e4e4 #777777 #fdf4dc #eef4ea #4a8cc0 #a9cde6 #eef5fb #ffffff",
    }.items()
}
#: Known to everyone, and there to be compared with.
BASELINES = ("SGD", "AdamW")


def colour_of(name: str, rivals: Sequence[str] = ()) -> str:
    """The colour of a thalweg optimizer, or of a rival in that place; that of any other follows from its name."""
    if name in COLOURS:
        return COLOURS[name]
    if name in rivals:
        return RIVALS[list(rivals).index(name) % len(RIVALS)]
    hue = zlib.crc32(name.encode()) % 360 / 360
    return "#" + "".join(f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(hue, *OTHERS))


def shade(colour: str) -> str:
    """A colour as it is seen on dark paper: black turns white, and what is dim gets brighter.

    >>> shade("#2b2b2b"), shade("#0072b2"), shade("#e69f00")
    ('#d4d4d4', '#308dc1', '#e69f00')
    """
    channels = [float(int(colour[at : at + 2], 16)) for at in (1, 3, 5)]
    if luminance(channels) < 0.05:
        channels = [255 - channel for channel in channels]
    while luminance(channels) < 0.2:
        channels = [channel + (255 - channel) * 0.1 for channel in channels]
    return "#" + "".join(f"{int(channel + 0.5):02x}" for channel in channels)


def luminance(channels: Sequence[float]) -> float:
    """As WCAG defines it: 0 for black, 1 for white."""
    shares = [channel / 255 for channel in channels]
    red, green, blue = (s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
