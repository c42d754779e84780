"""`overview` and its page: what it says of a run, that it needs nothing from elsewhere, and that names are text."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import pytest

from bucketpoint.catalog.catalog import open_catalog
from bucketpoint.cli import svg
from bucketpoint.cli.commands.overview import _request_lines, _requests
from bucketpoint.cli.svg import Chart, SaveMark, curve, saves, storage
from cli.conftest import Program, enter, save
from cli.test_plot import contrast
from cli.test_retention import STEPS, save_run, write
from cli.test_watch import begin
from kit.servers import S3Server

HOSTILE = "<script>alert(1)</script>"


class Page:
    """A parsed page. Each element must be closed, and by its name."""

    def __init__(self, source: str) -> None:
        elements = [(one.tag.rpartition("}")[2], one) for one in ET.fromstring(source).iter()]
        self.names = [name for name, _ in elements]
        self.attributes = [(name, *pair) for name, one in elements for pair in one.items()]
        pieces = [(name, piece or "") for name, one in elements for piece in (one.text, *(part.tail for part in one))]
        self.texts = [(name, piece.strip()) for name, piece in pieces if piece.strip()]

    @property
    def text(self) -> str:
        return "\n".join(words for tag, words in self.texts if tag != "style")

    def of(self, tag: str) -> list[str]:
        return [words for name, words in self.texts if name == tag]

    def marks(self, kind: str) -> int:
        return self.attributes.count(("path", "class", f"save {kind}"))


def made(program: Program, root: str, file: Path, *arguments: str, code: int = 0) -> Page:
    done = program("overview", root, "--html", str(file), *arguments)
    assert done.code == code, done.err
    return Page(file.read_text(encoding="utf-8"))


def test_shows_checkpoints_saves_costs_and_the_policy_on_the_page(program: Program, tmp_path: Path) -> None:
    root = f"file://{tmp_path}/run"
    save_run(root, *STEPS)
    assert program("report", root, "20", "eval/loss=0.5").code == 0
    assert program("pin", root, "10", "--reason", "release 1.0").code == 0
    begin(root, 60, 100, 200)
    policy = write(tmp_path, root, grace="1h")
    program("prune", str(policy))
    file = tmp_path / "page.html"
    shown = made(program, root, file, "--policy", str(policy))
    assert shown.of("h1") == [root]
    assert shown.of("h2") == [
        "Storage and cost",
        "Metrics",
        "Saves over time",
        "Policy",
        "Checkpoints",
        "Saves that have not committed",
    ]
    cells = shown.of("td")
    assert [cell for cell in cells if cell in map(str, STEPS)] == [*map(str, reversed(STEPS))]
    assert "kept by latest: 2" in cells
    assert "kept by best: eval/loss min 1" in cells
    assert "eval/loss=0.5" in cells
    assert next(cell for cell in cells if cell.endswith(": release 1.0")).startswith("kept for safety; pinned by ")
    # The one reported metric has a mark besides the bars.
    assert (shown.marks("kept"), shown.marks("going"), shown.marks("live")) == (5, 1, 1)
    assert "step 30: deleted after 20" in shown.text
    # The picture is that of `prune --plot`.
    assert f"{root}" in shown.of("title")
    assert "best: eval/loss min 1: 1 checkpoint" in shown.of("title")
    assert "2 of 3 objects, 300 B of" in shown.text


def test_prices_the_requests_of_two_thousand_ranks_that_save_every_ten_minutes() -> None:
    # Each object of 64 MiB takes eight parts, and two requests more.
    found = _requests({"objects": 2000, "bytes": 2000 * (64 << 20)}, 600, 0.005)
    assert found == {"a_save": 20_003, "saves_a_month": 4_320, "dollars_a_month": 432.06}
    line = "4,320 saves a month of 20,003 requests each: $432.06 a month at $0.005 for 1,000"
    assert list(_request_lines(found, 0.005)) == [line]
    small = _requests({"objects": 2000, "bytes": 2000}, 600, 0.005)
    assert small is not None
    assert small["a_save"] == 2_003
    assert _requests({"objects": None, "bytes": None}, 600, 0.005) is None
    assert _requests({"objects": 1, "bytes": 1}, None, 0.005) is None


def test_shows_the_same_costs_as_text_and_on_the_page(program: Program, tmp_path: Path, root: str) -> None:
    save_run(root, *STEPS)
    local = root.startswith(("/", "file:"))
    assert (" of 6 requests each: $" in program("overview", root).out) is not local  # those to a folder cost nothing
    save(f"{root}/step-60")
    policy = str(write(tmp_path, root))
    shown = made(program, root, tmp_path / "page.html", "--policy", policy, "--price", "1000")
    costs = program("overview", root, "--policy", policy, "--price", "1000")
    *lines, price = costs.out.splitlines()
    # A line for no checkpoint is left out, such as that of those with a tombstone.
    names = ["now", "of these without a record", "kept by the policy"]
    assert [line.split("  ")[0] for line in lines] == names
    assert price == "at $1000.0 a GB-month"
    assert {*names} <= {*shown.of("td")}
    found = program("overview", root, "--policy", policy, "--price", "1000", "--json").json
    for part in ("now", "no_record", "what_if"):
        assert f"${found[part]['dollars_a_month']:,.2f} a month" in shown.of("td")
    assert {name: found[name] for name in found["now"]} == found["now"]
    assert (found["html"], found["tombstoned"]["checkpoints"]) == (None, 0)


def test_writes_hostile_names_as_text_on_the_page(program: Program, tmp_path: Path) -> None:
    root = str(tmp_path / "<img src=x onerror=alert(2)>&run")
    save_run(root, 10, 20, 30)
    assert program("report", root, "30", f'{HOSTILE}"><b>=0.5').code == 0
    assert program("pin", root, "10", "--reason", f"</td>{HOSTILE}\x1b[2J\u202e").code == 0
    policy = tmp_path / "policy.yaml"
    policy.write_text(
        f"version: 1\nkeep:\n  latest: 1\n  best:\n    - {{metric: '{HOSTILE}', mode: min}}\nprune: {{grace: 1h}}\n"
    )
    catalog = open_catalog(root)
    catalog.write(catalog.own_key("steps", f"{HOSTILE.replace('/', '')}"), b"x")
    file = tmp_path / "page.html"
    shown = made(program, root, file, "--policy", str(policy), "--verify")
    assert not {"script", "img"} & {*shown.names}
    assert shown.names.count("b") == 4
    assert f'{HOSTILE}"><b>=0.5' in shown.text
    assert rf"</td>{HOSTILE}\x1b[2J\u202e" in shown.text
    assert f"best: {HOSTILE} min 1: 0 checkpoints" in shown.text
    assert root in shown.of("h1")
    assert f"neither record nor note: {HOSTILE.replace('/', '')}" in shown.text
    assert all(letter.isprintable() or letter == "\n" for letter in file.read_text(encoding="utf-8"))
    assert not [one for one in shown.attributes if one[1].startswith("on")]


def test_lists_the_newest_checkpoints_and_loads_and_runs_nothing_from_elsewhere(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bucketpoint.cli.page.MOST_ROWS", 2)
    root, file = str(tmp_path / "run"), tmp_path / "page.html"
    save_run(root, *STEPS)
    shown = made(program, root, file, "--policy", str(write(tmp_path, root)))
    assert [cell for cell in shown.of("td") if cell in map(str, STEPS)] == ["50", "40"]
    assert "and 3 older checkpoints" in shown.text
    links = {value for _, name, value in shown.attributes if name in ("href", "src", "xlink:href", "action", "data")}
    assert links == {"data:,"}
    assert ("meta", "content", "default-src 'none'; style-src 'unsafe-inline'; img-src data:") in shown.attributes
    assert not [word for word in ("url(", "@import") if word in file.read_text()]
    assert ("meta", "content", "light dark") in shown.attributes


def test_leaves_credentials_and_the_user_in_a_url_off_the_page(
    minio: S3Server, program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = minio.make_bucket()
    with monkeypatch.context() as patch:
        enter(patch, minio.env)
        save_run(f"s3://{bucket}/run", 10)
    options = [f"--storage-option=key={minio.key}", f"--storage-option=secret={minio.secret}"]
    options += ["--endpoint-url", minio.endpoint]
    file = tmp_path / "page.html"
    made(program, f"s3://{bucket}/run", file, "--verify", *options)
    shown = file.read_text(encoding="utf-8")
    assert not [secret for secret in (minio.secret, minio.endpoint) if secret in shown]
    save("memory://someone@place/run/step-1")
    made(program, "memory://someone@place/run", file, "--verify")
    assert "memory://place/run" in file.read_text(encoding="utf-8")
    assert "someone" not in file.read_text(encoding="utf-8")


def test_reads_every_checkpoint_with_verify_and_names_the_damage(program: Program, tmp_path: Path) -> None:
    root = tmp_path / "run"
    save_run(str(root), 10, 20)
    file = tmp_path / "page.html"
    whole = made(program, str(root), file, "--verify")
    assert "2 of 2 checkpoints are whole. Every byte was read." in whole.text
    damaged = next((root / "step-10/data").rglob("*-optim-0.distcp"))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    (root / "step-20/.metadata").write_bytes(b"nonsense")
    shown = made(program, str(root), file, "--verify", code=1)
    assert "0 of 2 checkpoints are whole" in shown.text
    (line,) = [words for words in shown.of("div") if words.startswith("DAMAGED optim.m ")]
    assert "CRC32C" in line
    words = shown.of("div")
    (verdict,) = [each for each in words if each.startswith(f"{root}/step-10 is DAMAGED in 2 places: ")]
    assert words.index(verdict) < words.index(line)
    assert f"DAMAGED {root}/step-20: " in shown.text
    done = program("overview", str(root), "--verify", "--json")
    assert (done.code, done.json["verified"]) == (1, {"whole": 0, "damaged": 2})
    assert f"DAMAGED {root}/step-20: " in program("overview", str(root), "--verify").out
    assert "Verification" not in made(program, str(root), file).of("h2")


def test_shows_as_the_newest_whole_checkpoint_one_that_verify_found_whole(program: Program, tmp_path: Path) -> None:
    root, file = tmp_path / "run", tmp_path / "page.html"
    save_run(str(root), 10, 20, 30, 40)
    assert program("rollback", str(root), "20").code == 0
    newest = "age of the newest whole checkpoint, step "
    for step, left in ((20, "10"), (10, "40"), (40, "30")):
        (root / f"step-{step}/.metadata").write_bytes(b"nonsense")
        shown = made(program, str(root), file, "--verify", code=1)
        assert [words for words in shown.of("span") if newest in words] == [newest + left]
        assert newest + left not in made(program, str(root), file).of("span")
    assert "1 of 4 checkpoints is whole" in shown.text
    assert [cell.split(";")[0] for cell in shown.of("td") if cell.startswith("damaged")] == ["damaged"] * 3
    assert shown.attributes.count(("tr", "class", "damaged")) == 3
    (root / "step-30/.metadata").write_bytes(b"nonsense")
    shown = made(program, str(root), file, "--verify", code=1)
    assert shown.of("b")[0] == "none"


def test_makes_a_page_of_a_run_without_a_checkpoint(program: Program, tmp_path: Path) -> None:
    begin(str(tmp_path / "run"), 10, 5)
    policy = write(tmp_path, str(tmp_path / "run"))
    shown = made(program, str(tmp_path / "run"), tmp_path / "page.html", "--policy", str(policy))
    assert shown.of("b")[:2] == ["none", "0"]
    assert shown.marks("live") == 1


def path_of(chart: Chart, kind: str) -> str:
    return next((path for name, path, _ in chart.marks if name == kind), "")


def points(chart: Chart) -> Iterator[tuple[float, float]]:
    """The corners of the drawn line of stored bytes: time as a share of the width, bytes as a share of the height."""
    x = 0.0
    for part in path_of(chart, "stored").replace("H", " H").replace("V", " V").split()[2:]:
        if part.startswith("H"):
            x = float(part[1:])
        else:
            yield round((x - 4) / 992, 2), round((98 - float(part[1:])) / 90, 2)


def test_draws_stored_bytes_that_rise_with_saves_and_fall_with_tombstones() -> None:
    chart = storage([(0.0, 100), (50.0, 300), (200.0, -100)], 100.0, "stored")
    assert chart is not None
    assert [*points(chart)] == [(0.0, 0.25), (0.25, 1.0)]
    assert chart.heights == ("400 B", "0 B")
    assert path_of(chart, "ahead")
    assert [*chart.times][1].startswith("dashed: until")
    chart = storage([(0.0, 100)], 100.0, "stored")
    assert chart is not None
    assert not path_of(chart, "ahead")
    assert storage([], 100.0, "stored") is None


def test_draws_a_save_above_the_line_if_it_committed_and_below_otherwise() -> None:
    marks = [SaveMark(0.0, 10, "kept", "a"), SaveMark(1.0, 5, "dead", "b"), SaveMark(2.0, 0, "going", "c")]
    chart = saves(marks, "label")
    kept, dead, going = (float(path_of(chart, f"save {kind}").partition("V")[2]) for kind in ("kept", "dead", "going"))
    assert kept < going < 74 < dead
    # One path for many of a kind: a tooltip for each would make the page several times as large.
    many = saves([SaveMark(60.0 * n, 10, "kept", "") for n in range(svg.TOOLTIPS + 1)], "label")
    assert path_of(many, "save kept").count("74V8.0") == svg.TOOLTIPS + 1


def test_gives_the_axes_of_every_chart_their_units() -> None:
    marks = [SaveMark(1e9 + 60 * n, n, "kept", "") for n in (1, 2, 3)]
    times = ["2001-09-09 01:47:40 UTC", "2001-09-09 01:49:40 UTC"]
    for chart, heights in (
        (saves(marks, "sizes"), ["3 B", "0 B"]),
        (curve(marks, "loss"), ["3", "1"]),
        (curve(marks[:1], "one value"), ["1"]),
    ):
        assert [*chart.heights] == heights
        assert [*chart.times] == times[: len(heights)]
    # The lowest value lies at the bottom, and the highest at the top.
    assert path_of(curve(marks, "loss"), "stored") == "M4.0 90.0L500.0 50.0L996.0 10.0"


def test_has_colours_on_the_page_that_are_seen_in_light_and_in_dark() -> None:
    sheet = (Path(svg.__file__).parent / "templates/page.css").read_text()
    light, dark = (dict(re.findall(r"--([\w-]+): (#\w{6})", part)) for part in sheet.split("@media (prefers-color")[:2])
    assert light.keys() == dark.keys()
    for colours in (light, dark):
        for name in ("ink", "quiet", "live", "dead"):
            assert contrast(colours[name], colours["card"]) >= 4.5, name
        assert contrast(colours["warn"], colours["warn-ground"]) >= 4.5
        for name in ("kept", "going"):
            assert contrast(colours[name], colours["card"]) >= 3, name
