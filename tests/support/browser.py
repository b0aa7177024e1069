"""A Chromium that tests drive, Debian's or Playwright's own, and the page in it."""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from inputs import KEY
from playwright.sync_api import Browser, Page, Playwright, expect, sync_playwright

FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),  # nothing but the page under test
)
MISSING = "no Chromium: install Debian's `chromium`, or run `playwright install chromium`"
STATUS = "Failed to load resource: the server responded with a status of"  # the page shows such an error in words
PATIENCE_MS = 120_000  # on a machine that does other things
_running: list[Playwright] = []


@contextmanager
def chromium(*flags: str) -> Iterator[Browser]:
    """A headless browser with further `flags`. The test is skipped, as not run, where there is none."""
    expect.set_options(timeout=PATIENCE_MS)
    with _playwright() as playwright:
        path = shutil.which("chromium") or playwright.chromium.executable_path
        if not Path(path).exists():
            pytest.skip(f"not run: {MISSING}")
        browser = playwright.chromium.launch(executable_path=path, args=[*FLAGS, *flags])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def _playwright() -> Iterator[Playwright]:
    """Its synchronous form allows one at a time: a browser beside another one has the same."""
    if _running:
        yield _running[0]
        return
    with sync_playwright() as found:
        _running.append(found)
        try:
            yield found
        finally:
            _running.clear()


@contextmanager
def visit(browser: Browser, url: str, key: str | None = KEY, allowed: str = "", **options: Any) -> Iterator[Page]:
    """The page of the server at `url`, once it has started, with the key entered. `options` are of Playwright's
    new_context. A script's error, or one of the console that the pattern `allowed` does not match, fails the test:
    what the Content-Security-Policy refuses is one.
    """
    context = browser.new_context(**options)
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    try:
        page.goto(f"{url}/")
        page.wait_for_selector("html[data-ready]")
        if key is not None:
            page.fill("#key", key)
            page.press("#key", "Enter")
        yield page
    finally:
        context.close()
    if unexpected := [each for each in problems if STATUS not in each and not (allowed and re.search(allowed, each))]:
        pytest.fail("the page's console has " + "; ".join(unexpected))
