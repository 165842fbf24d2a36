"""A real browser for tests of pages, where there is one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import pytest

COMMANDS = ("chromium", "chromium-browser", "google-chrome")
QUIET = [
    "--no-sandbox",
    "--headless",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


@contextmanager
def chromium() -> Iterator[Any]:
    """A started browser. Without one the test is skipped, or fails under THALWEG_BROWSER=required."""
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        missing("playwright is not installed")
    command = next(filter(None, map(shutil.which, COMMANDS)), None)
    if command is None:
        missing(f"there is none of {', '.join(COMMANDS)} on the path")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=command, args=QUIET)
        yield browser
        browser.close()


def missing(reason: str) -> NoReturn:
    if os.environ.get("THALWEG_BROWSER") == "required":
        pytest.fail(f"a browser is required: {reason}")
    pytest.skip(f"needs a browser: {reason}")
