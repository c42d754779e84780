"""Chromium for tests of pages: `page_at(width)` opens a page of that width, and the page may load nothing from outside.

Where Chromium or playwright is missing the tests are skipped, except under `make test-browser`, where they fail.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from typing import Any, Protocol

import pytest

REQUIRED = "BUCKETPOINT_BROWSER"
"""Set by `make test-browser`, so that a missing browser is a failure there."""

NO_CHROMIUM = "there is no Chromium here: install Debian's package `chromium`, or set $CHROMIUM to its program"
NO_PLAYWRIGHT = "the package playwright is not here: `make test-browser` builds an environment with it"

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_OF_THIS_MACHINE = ("file://", "data:", "about:", "http://127.0.0.1:", "http://localhost:")


class PageAt(Protocol):
    """Opens an empty page of playwright's in a window of a width, light or dark."""

    def __call__(self, width: int, *, height: int = 900, dark: bool = False) -> Any: ...


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """A headless Chromium that playwright drives, for the session."""
    program = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)
    if program is None:
        _missing(NO_CHROMIUM)
    if importlib.util.find_spec("playwright") is None:
        _missing(NO_PLAYWRIGHT)
    playwright = importlib.import_module("playwright.sync_api")
    # Chromium's sandbox refuses to run as root, which a container's only user is.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def page_at(chromium: Any) -> Iterator[PageAt]:
    """Factory of pages. The test fails at its end if a page asked for anything outside of this machine."""
    contexts: list[Any] = []
    outside: list[str] = []

    def open_page(width: int, *, height: int = 900, dark: bool = False) -> Any:
        scheme = "dark" if dark else "light"
        context = chromium.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        contexts.append(context)

        def answer(route: Any) -> None:
            url: str = route.request.url
            if url.startswith(_OF_THIS_MACHINE):
                route.continue_()
            else:
                outside.append(url)
                route.abort()

        context.route("**/*", answer)
        return context.new_page()

    yield open_page
    for context in contexts:
        context.close()
    assert outside == []


def overflow(page: Any) -> int:
    """Return by how many pixels the page is wider than its window."""
    # The drawer of the narrow page moves for a moment after the window was widened.
    page.evaluate("Promise.allSettled(document.getAnimations().map(animation => animation.finished))")
    width: int = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    return max(width, 0)


def _missing(reason: str) -> None:
    if os.environ.get(REQUIRED):
        pytest.fail(reason)
    pytest.skip(reason)
