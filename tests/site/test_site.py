"""The built site in a browser: every page fits a phone and a desktop, asks nobody else, and search and themes work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from browser.conftest import PageAt, overflow

SITE = Path(__file__).parents[2] / "build" / "site"

PHONE, DESKTOP = 390, 1280


def _addresses() -> list[str]:
    """Each page of the site, as a browser asks for it."""
    pages = sorted(page.parent.relative_to(SITE).as_posix() for page in SITE.rglob("index.html"))
    return ["" if page == "." else f"{page}/" for page in pages]


def test_shows_every_page_on_phone_and_desktop_without_an_error(site: str, page_at: PageAt) -> None:
    page = page_at(PHONE)
    faults = _heard(page)
    addresses = _addresses()
    assert len(addresses) > 45
    for address in addresses:
        page.goto(site + address, wait_until="load")
        for width in (PHONE, DESKTOP):
            page.set_viewport_size({"width": width, "height": 900})
            if wide := overflow(page):
                faults.append(f"{address}: {wide} pixels wider than a window of {width}")
        page.set_viewport_size({"width": PHONE, "height": 900})
    assert faults == []


def _heard(page: Any) -> list[str]:
    """Collect what the browser complains of while pages are opened."""
    faults: list[str] = []
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("requestfailed", lambda request: None if _left(request) else faults.append(f"{request.url} failed"))
    page.on(
        "response", lambda answer: faults.append(f"{answer.url}: {answer.status}") if answer.status >= 400 else None
    )
    return faults


def _left(request: Any) -> bool:
    """True if the request ended because the test went on to the next page. What is refused fails otherwise."""
    return bool(request.failure == "net::ERR_ABORTED")


def test_leads_a_search_to_a_name_and_to_a_page(site: str, page_at: PageAt) -> None:
    page = page_at(DESKTOP)
    faults = _heard(page)
    wanted_by = {"max_delete": "retention/", "latest_checkpoint": "reference/runs/"}
    typed = {"orbax": "quickstart/", "migrate": "quickstart/", "scheduler": "quickstart/"}
    typed |= {"HF Trainer": "transformers/", "multi-node": "jobs/", "GPU memory": "staging/", "best metric": "manager/"}
    typed |= {"logging": "saving/", "jupyter": "saving/"}
    for query, wanted in (wanted_by | typed).items():
        page.goto(site)
        page.fill("[data-md-component=search-query]", query)
        page.wait_for_selector(f".md-search-result__link[href*='{wanted}']")
        page.locator(f".md-search-result__link[href*='{wanted}']").first.click()
        page.wait_for_url(f"**/{wanted}**")
    assert faults == []


@pytest.mark.parametrize("dark", [False, True])
def test_follows_the_system_in_light_or_dark_with_readable_text(dark: bool, site: str, page_at: PageAt) -> None:
    page = page_at(DESKTOP, dark=dark)
    for address in ("", "quickstart/", "reference/saving/"):
        page.goto(site + address)
        scheme = page.evaluate("document.body.getAttribute('data-md-color-scheme')")
        assert scheme == ("slate" if dark else "default")
        assert page.evaluate(FAINT, TEXTS) == [], address


TEXTS = ".md-typeset p, .md-typeset p a, .md-typeset code, .md-typeset code span, .md-nav__link, .md-copyright"

FAINT = """selector => {
    // Colours painted over each other, as they may be translucent.
    const painted = colours => {
        const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
        for (const colour of colours) {
            canvas.fillStyle = colour;
            canvas.fillRect(0, 0, 1, 1);
        }
        return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const luminance = colours => {
        const [r, g, b] = painted(colours).map(v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const contrast = element => {
        const ground = [];
        for (let each = element; each; each = each.parentElement)
            ground.unshift(getComputedStyle(each).backgroundColor);
        const pair = [ground, [...ground, getComputedStyle(element).color]];
        const [low, high] = pair.map(luminance).sort((a, b) => a - b);
        return (high + 0.05) / (low + 0.05);
    };
    const texts = [...document.querySelectorAll(selector)]
        .filter(each => each.checkVisibility() && each.innerText.trim());
    return texts.filter(each => contrast(each) < 4.5).map(each => each.outerHTML.slice(0, 80) + contrast(each));
}"""
"""Texts whose luminance is too near to that of what is behind them: a ratio below 4.5, which WCAG 2 asks of text."""


def test_switches_from_the_systems_setting_to_light_and_dark_by_the_toggle(site: str, page_at: PageAt) -> None:
    page = page_at(DESKTOP, dark=True)
    page.goto(site)
    scheme: Callable[[], str] = lambda: page.evaluate("document.body.getAttribute('data-md-color-scheme')")  # noqa: E731
    seen = [scheme()]
    for _ in range(2):
        page.locator("form[data-md-component=palette] label:visible").click()
        seen.append(scheme())
    assert seen == ["slate", "default", "slate"]


def test_scrolls_wide_tables_and_code_in_their_box_on_a_phone(site: str, page_at: PageAt) -> None:
    page = page_at(PHONE)
    for address, box in (("benchmark/", ".md-typeset__scrollwrap"), ("quickstart/", ".highlight code")):
        page.goto(site + address)
        page.wait_for_function(
            "box => [...document.querySelectorAll(box)].some(each => each.scrollWidth > each.clientWidth)", arg=box
        )


def test_shows_a_file_of_the_repository_as_text_and_links_a_page_outside_docs(site: str, page_at: PageAt) -> None:
    page = page_at(DESKTOP)
    page.goto(f"{site}quickstart/")
    assert page.locator("a[href*='repository:'], a[href*='github.com/bucketpoint']").count() == 0
    assert page.get_by_text("train_gpt.py").count() >= 1
    page.goto(site)
    page.locator(".kinds a[href='security/']").click()
    page.wait_for_url(f"{site}security/")
