"""``python -m thalweg`` and ``thalweg`` are the same command."""

from __future__ import annotations

import sys

from thalweg.show.extras import MissingExtra


def main() -> None:
    try:
        from thalweg.cli import run
    except MissingExtra as missing:
        sys.exit(f"thalweg: {missing}")
    sys.exit(run())


if __name__ == "__main__":
    main()
