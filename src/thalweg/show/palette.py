"""One colour for each optimizer, in every picture and table."""

from __future__ import annotations

#: By Okabe and Ito, whose colours the colour-blind tell apart too; baselines are grey.
COLOURS = {
    "SGD": "#858585",
    "AdamW": "#2b2b2b",
    "LARS": "#e69f00",
    "LAMB": "#0072b2",
    "Adafactor": "#009e73",
    "Kron": "#d55e00",
}
#: Known to everyone, and there to be compared with.
BASELINES = ("SGD", "AdamW")
