"""Charts of a run over time, as SVG that is stretched to the width of the page. Words stand beside it, as HTML."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from bucketpoint.cli import text
from bucketpoint.cli.html.markup import Markup, element, joined
from bucketpoint.cli.plot import TOOLTIPS

WIDTH, HEIGHT = 1000.0, 100.0
"""The coordinates of a chart, whatever its size on the page."""

_BASE = 74.0
"""Position of the line of a chart of saves: committed ones stand above it, all others hang below."""

_LEAST = 6.0
"""Least height of a bar, so that a small save is seen."""


@dataclass(frozen=True)
class SaveMark:
    """A save in a chart of saves.

    Attributes:
        amount: what the height of its bar stands for: bytes, or seconds.
        kind: class of the mark: `kept`, `going`, `live` or `dead`.
        words: tooltip.
    """

    time: float
    amount: float
    kind: str
    words: str


def saves(marks: Sequence[SaveMark], label: str, *, beside: Sequence[SaveMark] = ()) -> Markup:
    """Draw saves over time, each as a bar.

    Args:
        beside: saves of another chart, whose time axis this one has, too.
    """
    if not marks:
        return Markup("")
    times = [mark.time for mark in (*marks, *beside)]
    at = _scale(times)
    largest = max(mark.amount for mark in marks) or 1
    drawn: list[str] = [element("path", class_="base", d=f"M0 {_BASE:g}H{WIDTH:g}")]
    silent: dict[str, list[str]] = {}
    for mark in marks:
        height = _LEAST + (_BASE - 8 - _LEAST) * mark.amount / largest
        end = _BASE - height if mark.kind in ("kept", "going") else HEIGHT - 4
        shape = f"M{at(mark.time):.1f} {_BASE:g}V{end:.1f}"
        if len(marks) <= TOOLTIPS:
            drawn.append(element("path", element("title", mark.words), class_=f"save {mark.kind}", d=shape))
        else:
            silent.setdefault(mark.kind, []).append(shape)
    drawn += [element("path", class_=f"save {kind}", d="".join(shapes)) for kind, shapes in silent.items()]
    return _chart(drawn, label, [text.when(min(times)), text.when(max(times))])


def storage(changes: Iterable[tuple[float, int]], now: float, label: str, money: Callable[[int], str]) -> Markup:
    """Draw the bytes that are stored over time, and those that are left once tombstones are carried out.

    Args:
        changes: times, some of them in the future, and the bytes that come or go then.
        money: returns the cost of bytes, in words.
    """
    ordered = sorted(changes)
    if not ordered:
        return Markup("")
    totals = accumulate(change for _, change in ordered)
    steps = [(time, total) for (time, _), total in zip(ordered, totals, strict=True)]
    most = max(amount for _, amount in steps) or 1
    last = max(now, steps[-1][0])
    at = _scale([steps[0][0], last])

    def y(amount: int) -> float:
        return HEIGHT - 2 - (HEIGHT - 10) * amount / most

    past = [step for step in steps if step[0] <= now]
    present = past[-1][1] if past else 0
    line = f"M{at(steps[0][0]):.1f} {y(0):.1f}" + "".join(f"H{at(time):.1f}V{y(amount):.1f}" for time, amount in past)
    line += f"H{at(now):.1f}"
    drawn: list[str] = [
        element("path", class_="area", d=f"{line}V{y(0):.1f}Z"),
        element("path", class_="stored", d=line),
    ]
    words = [text.when(steps[0][0]), "now"]
    if later := [step for step in steps if step[0] > now]:
        ahead = "".join(f"H{at(time):.1f}V{y(amount):.1f}" for time, amount in later)
        drawn.append(element("path", class_="ahead", d=f"M{at(now):.1f} {y(present):.1f}{ahead}"))
        drawn.append(element("path", class_="now", d=f"M{at(now):.1f} 0V{HEIGHT:g}"))
        words = [words[0], f"dashed: until {text.when(last)}"]
    top = f"at most {text.size(most)}, {money(most)} a month"
    return joined([element("p", top, class_="top"), _chart(drawn, label, words)])


def _scale(times: Sequence[float]) -> Callable[[float], float]:
    first, last = min(times), max(times)
    if last <= first:
        return lambda time: WIDTH / 2
    # Half a bar is left free at both ends.
    return lambda time: 4 + (WIDTH - 8) * (time - first) / (last - first)


def _chart(drawn: Iterable[str], label: str, words: Sequence[str]) -> Markup:
    svg = element(
        "svg",
        *drawn,
        class_="chart",
        viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}",
        preserveAspectRatio="none",
        role="img",
        aria_label=label,
    )
    axis = element("div", *(element("span", word) for word in dict.fromkeys(words)), class_="axis")
    return joined([svg, axis])
