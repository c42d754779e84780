"""The page that describes a run: its sections, each made from fields of the document of `watch` and from a plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bucketpoint.cli import run_lines, text
from bucketpoint.cli.html import charts
from bucketpoint.cli.html.charts import SaveMark
from bucketpoint.cli.html.markup import Markup, element
from bucketpoint.cli.html.policy_picture import picture
from bucketpoint.cli.html.style import STYLE
from bucketpoint.version import __version__

if TYPE_CHECKING:
    from bucketpoint.retention import Plan

MOST_ROWS = 1000
"""Most checkpoints in the table: a page of more is slow to open. The charts show all."""

# No script, and nothing from anywhere else, whatever a name in the run managed to write into the page.
_ALLOWED = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

_KINDS = {
    "kept": "saved",
    "going": "has a tombstone",
    "live": "not committed yet",
    "dead": "never committed",
}


@dataclass(frozen=True)
class RunReport:
    """Content of the page.

    Attributes:
        title: URL of the run, without credentials.
        document: fields as in the document of `watch`, with all checkpoints, the newest first.
        costs: title, number of checkpoints, bytes and dollars a month of each line of costs.
        price: dollars for a GB and month.
        seconds: duration of saves by the URL of their checkpoint, as far as known.
        pins: step, and the reason and the author of its pin.
        plan: plan of the policy; None without a policy.
        verified: URL of each checkpoint, True if it is whole, and the lines of `verify`; None if none was verified.
    """

    title: str
    document: Mapping[str, Any]
    costs: Sequence[tuple[str, int, int, float]]
    price: float
    seconds: Mapping[str, float] = field(default_factory=dict)
    pins: Sequence[tuple[int, str, str]] = ()
    plan: Plan | None = None
    verified: Sequence[tuple[str, bool, Sequence[str]]] | None = None


def page(report: RunReport) -> str:
    """Return the page: one file that needs no other."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_ALLOWED),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        # Without it browsers ask the server of the page for one.
        element("link", rel="icon", href="data:,"),
        element("title", f"Checkpoints of {report.title}"),
        element("style", Markup(STYLE)),
    )
    made = text.when(report.document["taken"])
    sections = (_problems, _storage, _saves, _policy, _checkpoints, _attempts, _verification)
    run = report.document["run"]
    body = element(
        "main",
        element("h1", report.title),
        element("p", f"{f'run {run}, ' if run else ''}as it was at {made}", class_="quiet"),
        element("div", *_tiles(report), class_="tiles"),
        *(part for section in sections for part in section(report)),
        element("footer", f"Made by bucketpoint {__version__}.", class_="quiet"),
    )
    return f'<!DOCTYPE html>\n<html lang="en">\n{head}\n{element("body", body)}\n</html>\n'


def _tiles(report: RunReport) -> Iterator[Markup]:
    document, (_, number, nbytes, dollars) = report.document, report.costs[0]
    newest, taken = _newest_whole(report), document["taken"]
    if newest is None:
        yield _tile("none", "whole checkpoint")
    else:
        yield _tile(run_lines.age(newest, taken), f"age of the newest whole checkpoint, step {newest['step']}")
    yield _tile(f"{number:,}", "checkpoint" if number == 1 else "checkpoints")
    yield _tile(text.size(nbytes), "stored")
    yield _tile(_dollars(dollars), f"a month, at ${report.price:g} a GB")
    if document["attempts"]:
        saves = len(document["attempts"])
        yield _tile(f"{saves:,}", f"{'save that has' if saves == 1 else 'saves that have'} not committed")


def _newest_whole(report: RunReport) -> Mapping[str, Any] | None:
    """Return the newest whole checkpoint, or None. One that was found damaged is not whole."""
    newest: Mapping[str, Any] | None = report.document["newest"]
    damaged = _damaged(report)
    if newest is None or newest["url"] not in damaged:
        return newest
    whole = [row for row in report.document["checkpoints"] if row["kind"] == "full" and row["url"] not in damaged]
    # One that is to be deleted comes last, as in a restore.
    return max(whole, key=lambda row: (_kind(row) == "kept", row["step"]), default=None)


def _damaged(report: RunReport) -> set[str]:
    return {url for url, ok, _ in report.verified or () if not ok}


def _tile(value: str, words: str) -> Markup:
    return element("div", element("b", value), element("span", words, class_="quiet"), class_="tile")


def _problems(report: RunReport) -> Iterator[Markup]:
    if lines := list(run_lines.notices(report.document)):
        yield _section("Look at this", _list(lines), class_="warn")


def _storage(report: RunReport) -> Iterator[Markup]:
    document = report.document
    changes = [(row["created"], row["bytes"]) for row in document["checkpoints"] if row["bytes"]]
    changes += [
        # A tombstone that is due is carried out by the next prune: soon, and not in the past.
        (max(row["tombstone"]["due"], document["taken"] + 1), -(row["bytes"] or 0))
        for row in document["checkpoints"]
        if row["tombstone"] and row["tombstone"]["action"] == "delete"
    ]

    def money(nbytes: int) -> str:
        return _dollars(nbytes / 1e9 * report.price)

    rows = [
        (title, f"{number:,}", text.size(nbytes), f"{_dollars(dollars)} a month")
        for title, number, nbytes, dollars in report.costs
    ]
    yield _section(
        "Storage and cost",
        charts.storage(changes, document["taken"], "Stored bytes over time", money),
        element(
            "p",
            "The checkpoints that are there now, from their save on. Those that were deleted are not counted.",
            class_="quiet",
        ),
        _table([("", ""), ("checkpoints", "number"), ("size", "number"), ("cost", "number")], rows),
    )


def _saves(report: RunReport) -> Iterator[Markup]:
    marks = list(_marks(report))
    if not marks:
        return
    kinds = {mark.kind for mark in marks}
    legend = [element("span", element("i", class_=kind), words) for kind, words in _KINDS.items() if kind in kinds]
    gap = report.document["interval_s"]
    words = "The height of a bar is the size of the checkpoint. Saves that have not committed hang below the line."
    if gap is not None:
        words += f" The last ones were {run_lines.duration(gap)} apart."
    yield _section(
        "Saves over time",
        charts.saves(marks, "Saves over time"),
        element("div", *legend, class_="legend quiet"),
        element("p", words, class_="quiet"),
        *_durations(report, marks),
    )


def _durations(report: RunReport, every: Sequence[SaveMark]) -> Iterator[Markup]:
    marks = [
        SaveMark(row["created"], report.seconds[row["url"]], _kind(row), _words(report, row))
        for row in report.document["checkpoints"]
        if row["url"] in report.seconds
    ]
    if not marks:
        return
    least, most = (run_lines.took(of(mark.amount for mark in marks)) for of in (min, max))
    words = most if least == most else f"{least} to {most}"
    yield element("h3", f"From the call of a save to its commit: {words}")
    yield charts.saves(marks, "Duration of saves over time", beside=every)


def _marks(report: RunReport) -> Iterator[SaveMark]:
    for row in report.document["checkpoints"]:
        yield SaveMark(row["created"], row["bytes"] or 0, _kind(row), _words(report, row))
    for save in report.document["attempts"]:
        if save["started"] is not None:
            words = f"step {save['step']}, began {text.when(save['started'])}, not committed"
            yield SaveMark(save["started"], save["bytes"] or 0, "live" if save["live"] else "dead", words)


def _kind(row: Mapping[str, Any]) -> str:
    return "going" if row["tombstone"] else "kept"


def _words(report: RunReport, row: Mapping[str, Any]) -> str:
    size = text.size(row["bytes"]) if row["bytes"] is not None else "unknown size"
    words = f"step {row['step']}, {text.when(row['created'])}, {size}"
    if row["url"] in report.seconds:
        words += f", took {run_lines.took(report.seconds[row['url']])}"
    return words


def _policy(report: RunReport) -> Iterator[Markup]:
    if report.plan is None:
        return
    lines = list(run_lines.prune_lines(report.document, report.document["taken"]))
    yield _section(
        "Policy",
        picture(report.plan, report.title),
        element("h3", lines[0][:1].upper() + lines[0][1:]),
        _list([line.strip() for line in lines[1:]]),
    )


def _checkpoints(report: RunReport) -> Iterator[Markup]:
    document = report.document
    rows = document["checkpoints"]
    if not rows:
        return
    reasons: dict[int, list[str]] = {}
    for step, reason, author in report.pins:
        reasons.setdefault(step, []).append(f"pinned by {author or 'somebody'}{f': {reason}' if reason else ''}")
    timed = any(row["url"] in report.seconds for row in rows)
    damaged = _damaged(report)
    heads = [("step", "number"), ("saved", "nowrap"), ("kind", "nowrap"), ("size", "number")]
    heads += [("took", "number")] if timed else []
    heads += [("metrics", "words"), ("kept or deleted", "")]
    cells = []
    for row in rows[:MOST_ROWS]:
        _, _, kind, size, metrics, _ = run_lines.row_cells(row, document["taken"])
        took = [run_lines.took(report.seconds[row["url"]]) if row["url"] in report.seconds else ""] if timed else []
        why = ["damaged"] if row["url"] in damaged else []
        why += [word for word in run_lines.fate(row, document["taken"]) if word != "pinned"]
        why += reasons.get(row["step"], ["pinned"]) if "pinned" in row["held"] else []
        cells.append((str(row["step"]), text.when(row["created"]), kind, size, *took, metrics, "; ".join(why)))
    goes = [bool(row["tombstone"]) or row.get("action") == "delete" for row in rows]
    classes = [
        "damaged" if row["url"] in damaged else "goes" if gone else None for row, gone in zip(rows, goes, strict=True)
    ]
    more = len(rows) - MOST_ROWS
    yield _section(
        "Checkpoints",
        _table(heads, cells, classes),
        element("p", f"and {text.count(more, 'older checkpoint')}", class_="quiet") if more > 0 else "",
    )


def _attempts(report: RunReport) -> Iterator[Markup]:
    document = report.document
    if not document["attempts"]:
        return
    cells = []
    for save in document["attempts"]:
        began = text.when(save["started"])
        # A save of which nothing was looked at is dead, or one of many.
        words = run_lines.progress(save, document["newest"], document["taken"])
        cells.append((str(save["step"]), began, _KINDS["live" if save["live"] else "dead"], words))
    heads = [("step", "number"), ("began", "nowrap"), ("state", "nowrap"), ("in the store", "")]
    yield _section(
        "Saves that have not committed",
        _table(heads, cells),
        element(
            "p", element("code", f"bucketpoint gc {report.title}"), " removes what dead saves left.", class_="quiet"
        )
        if not all(save["live"] for save in document["attempts"])
        else "",
    )


def _verification(report: RunReport) -> Iterator[Markup]:
    if report.verified is None:
        return
    whole = sum(ok for _, ok, _ in report.verified)
    checked = text.count(len(report.verified), "checkpoint")
    parts = [
        element("li", *(element("div", line) for line in lines), class_="whole" if ok else "damaged")
        for _, ok, lines in report.verified
    ]
    yield _section(
        "Verification",
        element("p", f"{whole} of {checked} {text.are(whole)} whole. Every byte was read."),
        element("ul", *parts),
    )


def _section(title: str, *content: str, class_: str | None = None) -> Markup:
    return element("section", element("h2", title), *content, class_=class_)


def _list(lines: Iterable[str]) -> Markup:
    return element("ul", *(element("li", line) for line in lines))


def _table(
    heads: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]], classes: Sequence[str | None] | None = None
) -> Markup:
    """Return a table. On a phone each row is a card, so that each cell carries the words of its column.

    Args:
        heads: words and class of each column.
        classes: class of each row.
    """
    body = [
        element(
            "tr",
            *(
                element("td", cell, data_label=head, class_=kind or None)
                for (head, kind), cell in zip(heads, row, strict=True)
            ),
            class_=classes[number] if classes is not None else None,
        )
        for number, row in enumerate(rows)
    ]
    head = element("tr", *(element("th", words, class_=kind or None) for words, kind in heads))
    return element("table", element("thead", head), element("tbody", *body))


def _dollars(amount: float) -> str:
    return f"${amount:,.2f}"
