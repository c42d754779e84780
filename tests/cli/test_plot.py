"""The picture of a plan: what is drawn where, for few checkpoints and for many, and that it can be read."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

import make_retention_plot
from bucketpoint.cli.svg import COLOURS, INK, LEFT, RIGHT, plan_picture
from bucketpoint.retention import Best, EverySteps, Keep, Plan, RetentionPolicy, Row, plan
from cli.conftest import Program
from cli.test_retention import save_run, write

ROOT = Path(__file__).resolve().parents[2]
NAME = "{http://www.w3.org/2000/svg}"


def made(number: int, *, pinned: int = 250) -> Plan:
    policy = RetentionPolicy(
        Keep(2, best=[Best("loss", "min", 2)], every=[EverySteps(500), EverySteps(100, last=3, thin="weights")])
    )
    return plan(
        policy,
        [
            Row(
                50 * place,
                1e9 + 60 * place,
                "a",
                bytes=3,
                groups={"model": 1, "optim": 2},
                metrics={"loss": float(abs(place - 7))},
                pinned=50 * place == pinned,
            )
            for place in range(number)
        ],
    )


def group(picture: str, name: str) -> list[ET.Element]:
    (found,) = [one for one in ET.fromstring(picture).iter(f"{NAME}g") if one.get("class") == name]
    return list(found)


def drawn(*paths: ET.Element) -> list[tuple[float, float, float]]:
    """The bars of paths: position of each, its top and its height."""
    shapes = "".join(path.get("d") or "" for path in paths)
    return [(float(x), float(y), float(height)) for x, y, height in re.findall(r"M(\S+) (\S+)v([\d.]+)", shapes)]


def test_escapes_what_no_picture_may_hold() -> None:
    # Python's name for a byte that is not UTF-8, and a control character that XML forbids.
    picture = plan_picture(made(3), "s3://bucket/<run>&co\udce9\x1b")
    title = ET.fromstring(picture).find(f"{NAME}title")
    assert title is not None
    assert title.text == "s3://bucket/<run>&co\\udce9\\x1b"
    assert picture.encode("utf-8").decode() == picture


def test_draws_a_thousand_checkpoints_and_does_not_hide_what_stays() -> None:
    planned = made(1000)
    picture = plan_picture(planned, "run")
    assert len(picture) < 50_000
    tree = ET.fromstring(picture)
    order = [one.get("class") for one in tree.iter(f"{NAME}g")]
    assert order.index("delete") < order.index("thin") < order.index("keep")
    keeps = drawn(*group(picture, "keep"))
    assert len(keeps) == len(planned.kept) == 100 + 2 + 2 + 1
    for x, _, _ in keeps + drawn(*group(picture, "delete")):
        assert LEFT <= x <= RIGHT
    assert re.findall(r'<g class="(?:keep|delete)" stroke-width="(.*)">', picture) == ["2", "2"]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_draws_few_checkpoints_and_none(number: int) -> None:
    picture = plan_picture(made(number), "run")
    ET.fromstring(picture)
    assert f"{number} checkpoint" in picture
    if number == 1:
        assert drawn(*group(picture, "keep"))[0][0] == (LEFT + RIGHT) / 2


def test_cuts_long_labels() -> None:
    planned = replace(made(23), rules=("match: " + "long." * 20 + "name:keep", *made(23).rules[1:]))
    tree = ET.fromstring(plan_picture(planned, "run"))
    assert all(len(words.text or "") <= 90 for words in tree.iter(f"{NAME}text"))
    assert all(len(words.text or "") <= 38 for words in tree.iter(f"{NAME}text") if words.get("font-size") == "11")


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2.2 defines it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_has_colours_that_are_seen_on_white_and_on_black() -> None:
    assert min(contrast(INK, "#ffffff"), contrast(INK, "#000000")) >= 4.5
    for colour in COLOURS:
        # The second is what GitHub's dark theme has behind pictures.
        assert min(contrast(colour, "#ffffff"), contrast(colour, "#0d1117")) >= 3
    used = set(re.findall(r'(?:fill|stroke)="([^"]*)"', plan_picture(made(23), "run")))
    assert used <= {INK, "none", *COLOURS}


def test_draws_the_picture_of_the_documentation(tmp_path: Path) -> None:
    drawn = tmp_path / "drawn.svg"
    assert make_retention_plot.main([str(drawn)]) == 0
    assert drawn.read_text() == (ROOT / "docs/retention.svg").read_text()


def test_writes_the_picture_and_changes_nothing_else_or_refuses(program: Program, tmp_path: Path) -> None:
    root = f"file://{tmp_path}/runs"
    save_run(root, 10, 20, 30)
    policy, picture = write(tmp_path, root), tmp_path / "plan.svg"
    before = sorted(str(path) for path in (tmp_path / "runs").rglob("*"))
    plan = ("prune", "--dry-run", str(policy))
    done = program(*plan, "--plot", str(picture))
    assert done.code == 0
    assert f"picture written to {picture}" in done.out
    assert f">{root}<" in picture.read_text()
    assert program(*plan, "--plot", str(picture), "--json").json["plot"] == str(picture)
    assert program(*plan, "--json").json["plot"] is None
    for options in (["--dry-run", "--plot", str(tmp_path / "plan.png")], ["--plot", str(picture)]):
        done = program("prune", str(policy), *options)
        assert done.code == 2
        assert "pass --dry-run, and a file that ends in .svg" in done.err
    done = program(*plan, "--plot", str(tmp_path / "no-folder" / "plan.svg"))
    assert done.code == 2
    assert "The picture cannot be written" in done.err
    assert "remedy" in done.err
    assert sorted(str(path) for path in (tmp_path / "runs").rglob("*")) == before
