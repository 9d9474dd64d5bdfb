"""A real browser for these tests; `make test-ui` sets everything up that they need."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.scripts import ROOT, Script

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, ConsoleMessage

CHROMIUM = os.environ.get("KREX_CHROMIUM") or shutil.which("chromium") or ""


def absent(what: str) -> None:
    """Skip, or fail where `make test-ui` promised that all is there."""
    if os.environ.get("KREX_UI_REQUIRED"):
        pytest.fail(what)
    pytest.skip(what)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One browser for all tests of a run."""
    if not CHROMIUM:
        absent("no chromium in PATH (Debian: apt-get install chromium), and KREX_CHROMIUM is not set")
    if not (ROOT / "krex_jupyter" / "labextension" / "package.json").exists():
        absent("the panel is not built: run make ui")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """A browser profile of its own; what the extension writes to a page's console fails the test."""
    ours: list[str] = []

    def note(message: ConsoleMessage) -> None:
        if re.search(r"krex", message.text + str(message.location), re.IGNORECASE):
            ours.append(message.text)

    made = browser.new_context(viewport={"width": 1400, "height": 900})
    made.grant_permissions(["clipboard-read", "clipboard-write"])
    made.on("console", note)
    # Lab and Notebook have errors of their own.
    made.on("weberror", lambda error: ours.append(str(error.error)) if "krex" in error.error.stack else None)
    yield made
    made.close()
    # A browser itself writes a line for every socket and request that fails.
    assert [
        text for text in ours if "WebSocket connection" not in text and "Failed to load" not in text
    ] == []


@pytest.fixture
def holders() -> Iterator[list[Script]]:
    """Scripts that a test started; ended with it."""
    started: list[Script] = []
    yield started
    for script in started:
        script.end()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Where KREX_UI_PICTURES names a directory, each page of a failed test leaves a picture there."""
    report = yield
    directory = os.environ.get("KREX_UI_PICTURES")
    made = getattr(item, "funcargs", {}).get("context")
    if directory and report.when == "call" and report.failed and made is not None:
        for index, page in enumerate(made.pages):
            page.screenshot(path=Path(directory) / f"{item.name}-{index}.png")
    return report
