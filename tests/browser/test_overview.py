"""The page of `overview` in Chromium: as wide as its window on a phone and on a desk, light and dark, and silent."""

from __future__ import annotations

from pathlib import Path

import pytest

from browser.conftest import PageAt, overflow
from bucketpoint.cli.app import run
from cli.test_retention import STEPS, save_run, write
from cli.test_watch import begin

LONG = "a/metric/" + "of_a_long_name" * 4


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """The page of a run with all that a page can have, and with names that are long or hostile."""
    root = str(tmp_path / ("run-of-a-long-name-" * 4 + "<script>alert(1)</script>".replace("/", "")))
    save_run(root, *STEPS)
    assert run(["report", root, "20", "eval/loss=0.5", f"{LONG}=0.123456789"]) == 0
    assert run(["report", root, "50", "<script>alert(2)</script>=1"]) == 0
    assert run(["pin", root, "10", "--reason", "x" * 300 + "<script>alert(3)</script>"]) == 0
    begin(root, 60, 5000)
    policy = str(write(tmp_path, root, grace="1h"))
    assert run(["prune", policy]) == 0
    file = tmp_path / "page.html"
    assert run(["overview", root, "--html", str(file), "--policy", policy, "--verify"]) == 0
    return file


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [320, 390, 1280])
def test_fits_into_the_width_of_its_window(
    page_at: PageAt, report: Path, tmp_path: Path, width: int, dark: bool
) -> None:
    page = page_at(width, dark=dark)
    said: list[str] = []
    page.on("dialog", lambda dialog: (said.append(dialog.message), dialog.dismiss()))
    page.on("console", lambda message: said.append(message.text))
    page.goto(report.as_uri())
    assert overflow(page) == 0
    picture = tmp_path / f"{width}.png"
    page.screenshot(path=picture, full_page=True)
    assert picture.stat().st_size > 10_000
    assert said == []
    # On a phone the picture of the policy is scrolled.
    assert page.locator(".plan svg").bounding_box()["width"] >= 640
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    light = sum(int(part) for part in ground.removeprefix("rgb(").removesuffix(")").split(",")) > 384
    assert light != dark
    smallest = page.evaluate(
        "Math.min(...[...document.querySelectorAll('main *')].filter(e => e.offsetParent && e.textContent.trim() "
        "&& !e.closest('svg')).map(e => parseFloat(getComputedStyle(e).fontSize)))"
    )
    assert smallest >= 13
