"""Run the commands of docs/gallery.md, and put the pictures that they draw where the page shows them.

python tools/gallery.py [PICTURE ...]    all of them, or those named: race.png
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
#: A command, and the next picture after it.
SHOWN = re.compile(r"^\$ (thalweg race.*)$[\s\S]*?\]\(images/([^)]+)\)", re.MULTILINE)
#: What a race draws, the most telling first.
DRAWN = ("batches.png", "valley.png", "race.png")


def main(wanted: list[str]) -> None:
    for command, picture in SHOWN.findall((DOCS / "gallery.md").read_text(encoding="utf-8")):
        if wanted and picture not in wanted:
            continue
        sys.stdout.write(f"== {command}\n")
        sys.stdout.flush()
        with tempfile.TemporaryDirectory() as folder:
            asked = [sys.executable, "-m", *shlex.split(command), "--out", folder]
            subprocess.run(asked, check=True)
            drawn = next(Path(folder, name) for name in DRAWN if Path(folder, name).exists())
            shutil.copyfile(drawn, DOCS / "images" / picture)


if __name__ == "__main__":
    main(sys.argv[1:])
