"""One colour for each optimizer, in every picture and table."""

from __future__ import annotations

import colorsys
import zlib
from collections.abc import Sequence

#: By Okabe and Ito, whose colours the colour-blind tell apart too; baselines are grey.
COLOURS = {
    "SGD": "#858585",
    "AdamW": "#2b2b2b",
    "LARS": "#e69f00",
    "LAMB": "#0072b2",
    "Adafactor": "#009e73",
    "Muon": "#6a3d9a",
    "Lion": "#c2185b",
    "Kron": "#d55e00",
}
#: For those of other libraries, in the order they come; whoever comes later begins anew.
RIVALS = ("#cc79a7", "#56b4e9", "#8c6d31", "#7b4173", "#b5a800", "#393b79")
#: Lightness and saturation of rules that have no colour here.
OTHERS = (0.4, 0.55)
#: Known to everyone, and there to be compared with.
BASELINES = ("SGD", "AdamW")


def colour_of(name: str, rivals: Sequence[str] = ()) -> str:
    """The colour of one of ours, or of the one in that place among rivals; that of any other follows from its name."""
    if name in COLOURS:
        return COLOURS[name]
    if name in rivals:
        return RIVALS[list(rivals).index(name) % len(RIVALS)]
    hue = zlib.crc32(name.encode()) % 360 / 360
    return "#" + "".join(f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(hue, *OTHERS))
