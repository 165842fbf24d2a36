"""Whether these are the tests of a day: `make test` leaves to `make test-all` what repeats a proof at great expense."""

from __future__ import annotations

import os

BY_DAY = "THALWEG_TESTS_SOON" in os.environ
