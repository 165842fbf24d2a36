"""``python -m thalweg.race``"""

from __future__ import annotations

import os

if __name__ == "__main__":
    # Matrices this small gain nothing from threads, which stall when others want the cores.
    # It has to be said before numpy is loaded.
    for library in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
        os.environ.setdefault(library, "1")

    from thalweg.race.command import main

    main()
