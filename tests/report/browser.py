"""A headless browser, for what only a browser can tell about a page."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu"]
TIMEOUT_MS = 120_000


@dataclass(kw_only=True)
class Seen:
    """What a page did while it was open.

    Attributes:
        page: The page, to be asked further.
        complaints: Errors and warnings of its console, and exceptions.
        requests: Addresses that it asked for, other than its own file and what it made itself.
        dialogs: Texts of the dialogs that it opened.
    """

    page: Any
    complaints: list[str] = field(default_factory=list[str])
    requests: list[str] = field(default_factory=list[str])
    dialogs: list[str] = field(default_factory=list[str])


def executable() -> str:
    """Return the browser; without one skip, or fail where the tests must not be left out."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        message = f"none of {', '.join(NAMES)} is installed; on Debian: apt-get install chromium"
        if os.environ.get("CI") or os.environ.get("REPLAYEVAL_REQUIRE_BROWSER"):
            pytest.fail(message)
        pytest.skip(message)
    return found


@contextmanager
def browsing() -> Iterator[Any]:
    """Start a browser that has no network."""
    path = executable()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS, timeout=TIMEOUT_MS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Any, path: Path, *, width: int = 1280, height: int = 900, scheme: str = "light") -> Iterator[Seen]:
    """Open a report and wait until its plots are drawn."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, offline=True)
    page = context.new_page()
    page.set_default_timeout(TIMEOUT_MS)
    seen = Seen(page=page)
    page.on("console", lambda message: seen.complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: seen.complaints.append(f"exception: {error}"))
    address = path.as_uri()

    def asked(request: Any) -> None:
        if request.url != address and not request.url.startswith(("data:", "blob:")):
            seen.requests.append(request.url)

    def said(dialog: Any) -> None:
        seen.dialogs.append(dialog.message)
        dialog.dismiss()

    page.on("request", asked)
    page.on("dialog", said)
    try:
        page.goto(address)
        page.wait_for_selector("html[data-ready=true]")
        yield seen
    finally:
        context.close()
