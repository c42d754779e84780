"""Page that describes a run: the values of its template, made from the document of `watch` and a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from bucketpoint.cli import run_lines, svg, text
from bucketpoint.cli.svg import SaveMark
from bucketpoint.version import __version__

if TYPE_CHECKING:
    from bucketpoint.retention import Plan

MOST_ROWS = 1000
"""Limit on the checkpoints in the table: a longer page is slow to open. The charts show all."""

_KINDS = {
    "kept": "saved",
    "going": "waiting to be deleted",
    "live": "not committed yet",
    "dead": "never committed",
}


def page(
    title: str,
    document: Mapping[str, Any],
    costs: Sequence[tuple[str, int, int, float]],
    price: float,
    pins: Sequence[tuple[int, str, str]],
    plan: Plan | None,
    verified: Sequence[tuple[str, bool, Sequence[str]]] | None,
) -> str:
    """Return the page as HTML that needs no other file.

    Args:
        title: URL of the run, without credentials.
        document: fields of the document of `watch`, with all checkpoints, the newest first.
        costs: title, number of checkpoints, bytes and dollars a month of each line of costs.
        price: dollars for a GB and month.
        pins: step, reason and author of each pin.
        plan: plan of the policy; None without a policy.
        verified: for each checkpoint its URL, True if it is whole, and the lines of `verify`; None without `--verify`.
    """
    taken, rows = document["taken"], document["checkpoints"]
    damaged = {url for url, ok, _ in verified or () if not ok}
    marks = [*_marks(document)]
    return svg.render(
        "page.html",
        title=title,
        document=document,
        version=__version__,
        tiles=[*_tiles(document, costs[0], price, damaged)],
        problems=[*run_lines.notices(document)],
        stored=svg.storage(_changes(document), taken, "Stored bytes over time"),
        costs=[
            ("", (title, f"{number:,}", text.size(nbytes), f"{_dollars(dollars)} a month"))
            for title, number, nbytes, dollars in costs
        ],
        saves=svg.saves(marks, "Saves over time") if marks else None,
        curves=[*_curves(document)],
        legend=[(kind, words) for kind, words in _KINDS.items() if any(mark.kind == kind for mark in marks)],
        picture=None if plan is None else Markup(svg.plan_picture(plan, title)),
        prune=[*run_lines.prune_lines(document, taken)],
        heads=[
            *(("step", "number"), ("saved", "nowrap"), ("kind", "nowrap"), ("size", "number")),
            *(("metrics", "words"), ("kept or deleted", "")),
        ],
        checkpoints=[*_checkpoints(document, pins, damaged)],
        more=len(rows) - MOST_ROWS,
        attempts=[*_attempts(document)],
        verified=verified,
        whole=sum(ok for _, ok, _ in verified or ()),
    )


def _tiles(
    document: Mapping[str, Any], cost: tuple[str, int, int, float], price: float, damaged: set[str]
) -> Iterator[tuple[str, str]]:
    _, number, nbytes, dollars = cost
    newest: Mapping[str, Any] | None = document["newest"]
    if newest is not None and newest["url"] in damaged:
        # Skip damaged checkpoints. Prefer those that do not wait to be deleted, as a restore does.
        whole = [row for row in document["checkpoints"] if row["kind"] == "full" and row["url"] not in damaged]
        newest = max(whole, key=lambda row: (_kind(row) == "kept", row["step"]), default=None)
    if newest is None:
        yield "none", "whole checkpoint"
    else:
        yield run_lines.age(newest, document["taken"]), f"age of the newest whole checkpoint, step {newest['step']}"
    yield f"{number:,}", "checkpoint" if number == 1 else "checkpoints"
    yield text.size(nbytes), "stored"
    yield _dollars(dollars), f"a month, at ${price:g} a GB"
    if count := len(document["attempts"]):
        yield f"{count:,}", f"{'save that has' if count == 1 else 'saves that have'} not committed"


def _changes(document: Mapping[str, Any]) -> Iterator[tuple[float, int]]:
    """Yield the time of each change of the stored bytes, and the change: negative for a deletion."""
    for row in document["checkpoints"]:
        if row["bytes"]:
            yield row["created"], row["bytes"]
            if row["tombstone"] and row["tombstone"]["action"] == "delete":
                # The next prune carries out a tombstone that is due: draw the deletion after the present.
                yield max(row["tombstone"]["due"], document["taken"] + 1), -row["bytes"]


def _marks(document: Mapping[str, Any]) -> Iterator[SaveMark]:
    for row in document["checkpoints"]:
        yield SaveMark(row["created"], row["bytes"], _kind(row), _words(row))
    for save in document["attempts"]:
        if save["started"] is not None:
            words = f"step {save['step']}, began {text.when(save['started'])}, not committed"
            yield SaveMark(save["started"], save["bytes"] or 0, "live" if save["live"] else "dead", words)


def _curves(document: Mapping[str, Any]) -> Iterator[tuple[str, svg.Chart]]:
    """Yield the name and the chart of each metric."""
    values: dict[str, list[SaveMark]] = {}
    for row in document["checkpoints"]:
        for name, value in row["metrics"].items():
            if not isinstance(value, str):
                words = f"{_words(row)}, {name}={value:.6g}"
                values.setdefault(name, []).append(SaveMark(row["created"], value, _kind(row), words))
    for name, marks in values.items():
        yield name, svg.curve(marks, f"{name} over time")


def _kind(row: Mapping[str, Any]) -> str:
    return "going" if row["tombstone"] else "kept"


def _words(row: Mapping[str, Any]) -> str:
    return f"step {row['step']}, {text.when(row['created'])}, {text.size(row['bytes'])}"


def _checkpoints(
    document: Mapping[str, Any], pins: Sequence[tuple[int, str, str]], damaged: set[str]
) -> Iterator[tuple[str, list[str]]]:
    """Yield the class and the cells of each row of the table."""
    taken = document["taken"]
    reasons: dict[int, list[str]] = {}
    for pinned, reason, author in pins:
        reasons.setdefault(pinned, []).append(f"pinned by {author or 'somebody'}{f': {reason}' if reason else ''}")
    for row in document["checkpoints"][:MOST_ROWS]:
        step, _, kind, size, metrics, _ = run_lines.row_cells(row, taken)
        why = ["damaged"] if row["url"] in damaged else []
        why += [word for word in run_lines.fate(row, taken) if word != "pinned"]
        why += reasons.get(row["step"], ["pinned"]) if "pinned" in row["held"] else []
        goes = row["tombstone"] or row.get("action") == "delete"
        cells = [step, text.when(row["created"]), kind, size, metrics, "; ".join(why)]
        yield "damaged" if row["url"] in damaged else "goes" if goes else "", cells


def _attempts(document: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, ...]]]:
    for save in document["attempts"]:
        words = run_lines.progress(save, document["newest"], document["taken"])
        state = _KINDS["live" if save["live"] else "dead"]
        yield "", (str(save["step"]), text.when(save["started"]), state, words)


def _dollars(amount: float) -> str:
    return f"${amount:,.2f}"
