"""Pictures as SVG, drawn by the templates: the plan of a policy, and charts of a run over time.

The picture of a plan has no background, and colours of medium lightness: it is readable on white and on black.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from bucketpoint.cli import run_lines, text
from bucketpoint.errors import first_of
from bucketpoint.retention.plans import SAFETY

if TYPE_CHECKING:
    from bucketpoint.retention import Plan
    from bucketpoint.retention.plans import Entry

INK = "#757575"
"""Colour of text, and of marks without a rule. Contrast 4.5 to 1 on white and black, as WCAG 2.2 requires (1.4.3)."""

COLOURS = ("#2f7fd1", "#c8701a", "#1a9179", "#9266c8", "#cf5080", "#84841f", "#a9653a", "#3b8fa8")
"""Colours of the rules, in order and repeating. Contrast 3 to 1 on white and black, as WCAG 2.2 requires (1.4.11)."""

LEFT, RIGHT = 236.0, 746.0
"""Positions of the oldest and the newest step of a plan."""

LINE, FULL, HALF = 112, 40, 18
"""Position of the line of steps; height of bars for kept checkpoints, and for thinned or deleted ones."""

LABEL_CHARACTERS = 38
TOOLTIPS = 200
"""Limit on the checkpoints for which each mark gets a tooltip. With more, marks are narrower than a pointer."""

CHART_WIDTH, CHART_HEIGHT = 1000.0, 100.0
"""Width and height of a chart in its own coordinates. The page stretches the chart to the page's width."""

_BASE = 74.0
"""Position of the base line in a chart of saves: committed saves are drawn above the line, all others below."""

_WORDS = {"keep": "kept", "thin": "thinned to the weights", "delete": "deleted"}

Mark = tuple[str, str, str | None]
"""Class or colour of a shape, its path, and its tooltip."""


def render(template: str, **values: Any) -> str:
    """Fill in a template. Values are escaped, because anybody may have written names into the store."""
    return _environment().get_template(template).render(values)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("bucketpoint.cli"),
        autoescape=True,
        finalize=_written,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals.update(text=text, run_lines=run_lines)
    return environment


def _written(value: Any) -> Any:
    """Return a value as templates write it before the escaping for HTML: without control characters."""
    if isinstance(value, float):
        return f"{value:.1f}".removesuffix(".0")
    return text.printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def plan_picture(plan: Plan, title: str) -> str:
    """Draw a plan. The same plan gives the same text.

    Kept and thinned checkpoints are above the line, deleted ones below: the plan is clear without the colours.
    """
    steps = [entry.row.step for entry in plan.entries]
    at = _scale(steps, LEFT, RIGHT)
    colours = {rule: COLOURS[number % len(COLOURS)] for number, rule in enumerate(plan.rules)}

    def mark(entry: Entry, top: int, height: int) -> Mark:
        # Colour of the policy's first rule that keeps the checkpoint.
        colour = next((colours[reason.rule] for reason in entry.reasons if reason.rule in colours), INK)
        why = "; ".join(map(str, entry.reasons)) if entry.reasons else f"nearest: {entry.miss}"
        return colour, _bar(at(entry.row.step), top, height), f"step {entry.row.step}, {_WORDS[entry.action]}: {why}"

    # Deleted checkpoints are drawn first: if there are many, they must not cover the kept ones.
    kinds = (
        ("delete", plan.deleted, LINE, HALF),
        ("thin", plan.thinned, LINE - HALF, HALF),
        ("keep", plan.kept, LINE - FULL, FULL),
    )
    keeps: dict[str, list[float]] = {rule: [] for rule in (*plan.rules, SAFETY)}
    for entry in (*plan.kept, *plan.thinned):
        # A checkpoint kept for safety in several ways has several reasons of that name: draw it once.
        for rule in {reason.rule for reason in entry.reasons} & keeps.keys():
            keeps[rule].append(at(entry.row.step))
    pinned = [entry for entry in plan.entries if entry.row.pinned]
    counts = f"{len(plan.kept)} kept, {len(plan.thinned)} thinned, {len(plan.deleted)} deleted"
    summary = f"{text.count(len(steps), 'checkpoint')}: {counts}; {text.size(plan.freed_bytes)} freed"
    named = (("Kept", plan.kept), ("Thinned", plan.thinned), ("Pinned", pinned))
    lists = [f"{word}: steps {first_of([entry.row.step for entry in some], 20)}" for word, some in named if some]
    return render(
        "plan.svg",
        title=title,
        summary=summary,
        description=". ".join([summary, *lists]) + ".",
        line=LINE,
        ink=INK,
        colour=COLOURS[0],
        # Wide enough to be seen, and no wider than the space for one checkpoint.
        bar=max(2.0, min(9.0, 0.7 * (RIGHT - LEFT) / max(1, len(steps)))),
        groups=[
            (action, _joined([mark(entry, top, height) for entry in entries], tooltips=len(steps) <= TOOLTIPS))
            for action, entries, top, height in kinds
        ],
        pinned=dict.fromkeys(at(entry.row.step) for entry in pinned),
        rules=[
            (rule, len(places), y, colours.get(rule, INK), "".join(dict.fromkeys(_bar(x, y, 13) for x in places)))
            for y, (rule, places) in zip(range(LINE + HALF + 26, 10**6, 20), keeps.items(), strict=False)
        ],
        label=LABEL_CHARACTERS,
        axis=[(at(step), step) for step in _round_steps(steps[0], steps[-1])] if steps else [],
    )


def _bar(x: float, top: float, height: float) -> str:
    return f"M{round(2 * x) / 2:g} {top:g}v{height:g}"


def _joined(marks: Sequence[Mark], *, tooltips: bool) -> Sequence[Mark]:
    """Return the marks. Without tooltips, join those of a kind into one path with each shape once, for a small file."""
    if tooltips:
        return marks
    shapes: dict[str, dict[str, None]] = {}
    for kind, shape, _ in marks:
        shapes.setdefault(kind, {})[shape] = None
    return [(kind, "".join(paths), None) for kind, paths in shapes.items()]


def _scale(values: Sequence[float], left: float, right: float) -> Callable[[float], float]:
    """Return the function from a step or a time to its horizontal position; the middle if there is only one value."""
    first, last = min(values, default=0), max(values, default=0)
    if first == last:
        return lambda value: (left + right) / 2
    return lambda value: left + (right - left) * (value - first) / (last - first)


def _round_steps(first: int, last: int) -> list[int]:
    """Return at most seven round numbers within the range; the only number if the range has just one."""
    if first == last:
        return [first]
    width = 1
    while (last - first) / width > 6:
        # 1, 2, 5, 10, 20, 50, ...
        width = width * 5 // 2 if str(width)[0] == "2" else width * 2
    return list(range(-(-first // width) * width, last + 1, width))


@dataclass(frozen=True)
class SaveMark:
    """A save in a chart.

    Attributes:
        amount: bytes, or value of a metric, drawn as the height of the mark.
        kind: class of the mark: `kept`, `going`, `live` or `dead`.
        words: tooltip.
    """

    time: float
    amount: float
    kind: str
    words: str


@dataclass(frozen=True)
class Chart:
    """A chart of a run over time. `heights` and `times` are the words at the ends of its two axes."""

    label: str
    marks: Sequence[Mark]
    heights: Sequence[str]
    times: Iterable[str]


def saves(marks: Sequence[SaveMark], label: str) -> Chart:
    """Draw saves over time, each as a bar."""
    at, times = _time_axis(marks)
    largest = max(mark.amount for mark in marks)
    shapes: list[Mark] = []
    for mark in marks:
        # At least 6 high, so that a small save is visible.
        top = _BASE - 6 - (_BASE - 14) * mark.amount / (largest or 1)
        end = top if mark.kind in ("kept", "going") else CHART_HEIGHT - 4
        shapes.append((f"save {mark.kind}", f"M{at(mark.time):.1f} {_BASE:g}V{end:.1f}", mark.words))
    base: Mark = ("base", f"M0 {_BASE:g}H{CHART_WIDTH:g}", None)
    heights = text.size(largest), "0 B"
    return Chart(label, [base, *_joined(shapes, tooltips=len(marks) <= TOOLTIPS)], heights, times)


def curve(marks: Sequence[SaveMark], label: str) -> Chart:
    """Draw a metric over time as a line, with a mark for each checkpoint in the colour of its kind."""
    at, times = _time_axis(marks)
    low, high = (of(mark.amount for mark in marks) for of in (min, max))
    ordered = sorted(marks, key=lambda mark: mark.time)
    points = [
        (at(mark.time), CHART_HEIGHT - 10 - (CHART_HEIGHT - 20) * (mark.amount - low) / (high - low or 1))
        for mark in ordered
    ]
    line: Mark = ("stored", "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points), None)
    shapes: list[Mark] = [
        (f"save {mark.kind}", f"M{x:.1f} {y - 4:.1f}V{y + 4:.1f}", mark.words)
        for mark, (x, y) in zip(ordered, points, strict=True)
    ]
    heights = list(dict.fromkeys((f"{high:.6g}", f"{low:.6g}")))
    return Chart(label, [line, *_joined(shapes, tooltips=len(marks) <= TOOLTIPS)], heights, times)


def _time_axis(marks: Sequence[SaveMark]) -> tuple[Callable[[float], float], Iterable[str]]:
    """Return the function from a time to its position, and the words at the two ends."""
    times = [mark.time for mark in marks]
    # Half a bar is left free at both ends.
    return _scale(times, 4, CHART_WIDTH - 4), dict.fromkeys((text.when(min(times)), text.when(max(times))))


def storage(changes: Iterable[tuple[float, int]], now: float, label: str) -> Chart | None:
    """Draw the stored bytes over time, and the bytes left once tombstones are carried out; None without changes.

    A change is a time, possibly in the future, and the bytes added: negative for a deletion.
    """
    ordered = sorted(changes)
    if not ordered:
        return None
    steps = list(zip((time for time, _ in ordered), accumulate(change for _, change in ordered), strict=True))
    most = max(amount for _, amount in steps)
    last = max(now, steps[-1][0])
    at = _scale([steps[0][0], last], 4, CHART_WIDTH - 4)

    def y(amount: int) -> float:
        return CHART_HEIGHT - 2 - (CHART_HEIGHT - 10) * amount / (most or 1)

    def line(some: Sequence[tuple[float, int]]) -> str:
        return "".join(f"H{at(time):.1f}V{y(amount):.1f}" for time, amount in some)

    past = [step for step in steps if step[0] <= now]
    later = steps[len(past) :]
    stored = f"M{at(steps[0][0]):.1f} {y(0):.1f}{line(past)}H{at(now):.1f}"
    marks: list[Mark] = [("area", f"{stored}V{y(0):.1f}Z", None), ("stored", stored, None)]
    if later:
        marks.append(("ahead", f"M{at(now):.1f} {y(past[-1][1] if past else 0):.1f}{line(later)}", None))
        marks.append(("now", f"M{at(now):.1f} 0V{CHART_HEIGHT:g}", None))
    ends = text.when(steps[0][0]), f"dashed: until {text.when(last)}" if later else "now"
    return Chart(label, marks, (text.size(most), "0 B"), dict.fromkeys(ends))
