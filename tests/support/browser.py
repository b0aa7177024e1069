"""A Chromium that tests drive: Debian's, or Playwright's own."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),  # nothing but the page under test
)
MISSING = "no Chromium: install Debian's `chromium`, or run `playwright install chromium`"


@contextmanager
def chromium(*flags: str) -> Iterator[Browser]:
    """A headless browser with further `flags`. The test is skipped, as not run, where there is none."""
    with sync_playwright() as playwright:
        path = shutil.which("chromium") or playwright.chromium.executable_path
        if not Path(path).exists():
            pytest.skip(f"not run: {MISSING}")
        browser = playwright.chromium.launch(executable_path=path, args=[*FLAGS, *flags])
        try:
            yield browser
        finally:
            browser.close()
