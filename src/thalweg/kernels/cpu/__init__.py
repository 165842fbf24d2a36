"""Steps on CPUs: native code over raw memory, for numpy and torch alike."""

from __future__ import annotations

import sys

#: How names of shared libraries end here.
SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
