"""A plan as an SVG picture: steps on a line, the action for each checkpoint, and a row for each rule.

The picture has no background of its own, and colours of medium lightness: it is readable on white and on black.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from bucketpoint.cli import text
from bucketpoint.errors import first_of

if TYPE_CHECKING:
    from bucketpoint.retention import Plan
    from bucketpoint.retention.plans import Entry

INK = "#757575"
"""Colour of text, and of marks without a rule: contrast 4.5 to 1 on white and black, as WCAG 2.2 requires (1.4.3)."""

COLOURS = ("#2f7fd1", "#c8701a", "#1a9179", "#9266c8", "#cf5080", "#84841f", "#a9653a", "#3b8fa8")
"""Colours of the rules, in order and repeating: contrast 3 to 1 on both, as WCAG 2.2 requires of graphics (1.4.11)."""

WIDTH = 800
LEFT, RIGHT = 236.0, 746.0
"""Positions of the oldest and the newest step."""

LINE, FULL, HALF = 112.0, 40.0, 18.0
"""Position of the line of steps; height of bars for kept checkpoints, and for thinned or deleted ones."""

ROW = 20.0
LABEL_CHARACTERS = 38
TOOLTIPS = 200
"""Most checkpoints for which each bar gets a tooltip with its reasons. With more, bars are narrower than a pointer."""

_SAFETY = "safety"
_WORDS = {"keep": "kept", "thin": "thinned to the weights", "delete": "deleted"}


def svg(plan: Plan, title: str) -> str:
    """Draw a plan. The same plan gives the same text.

    Args:
        title: name of the planned object, such as the run's URL.
    """
    at = _scale(plan)
    # Wide enough to be seen, and no wider than the space for one checkpoint.
    width = max(2.0, min(9.0, 0.7 * (RIGHT - LEFT) / max(1, len(plan.entries))))
    rows = [*plan.rules, _SAFETY]
    bottom = LINE + HALF + 40 + ROW * len(rows)
    summary = (
        f"{text.count(len(plan.entries), 'checkpoint')}: {len(plan.kept)} kept, {len(plan.thinned)} thinned, "
        f"{len(plan.deleted)} deleted; {text.size(plan.freed_bytes)} freed"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 34:.0f}" width="{WIDTH}"',
        ' role="img" aria-labelledby="title summary" font-family="system-ui, sans-serif" font-size="12">',
        f'<title id="title">{text.escaped(title)}</title>',
        f'<desc id="summary">{text.escaped(_description(plan, summary))}</desc>',
        _words(12, 22, title if len(title) <= 90 else "…" + title[-89:], size=14, bold=True),
        _words(12, 40, summary),
        *_legend(),
        f'<line x1="{LEFT - 8}" x2="{RIGHT + 8}" y1="{LINE}" y2="{LINE}" stroke="{INK}"/>',
        *_checkpoints(plan, at, width),
        *_rules(plan, rows, at, width),
        *_axis(plan, at, bottom),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _scale(plan: Plan) -> Callable[[int], float]:
    """Return the function from a step to its horizontal position."""
    steps = [entry.row.step for entry in plan.entries] or [0]
    first, last = steps[0], steps[-1]
    if first == last:
        return lambda step: (LEFT + RIGHT) / 2
    return lambda step: LEFT + (RIGHT - LEFT) * (step - first) / (last - first)


def _checkpoints(plan: Plan, at: Callable[[int], float], width: float) -> Iterator[str]:
    """Draw kept and thinned ones above the line, deleted ones below: the shape is clear without the colour."""
    tooltips = len(plan.entries) <= TOOLTIPS
    # Deleted ones are drawn first: if there are many, they must not cover the kept ones.
    kinds = (
        ("delete", plan.deleted, LINE, HALF),
        ("thin", plan.thinned, LINE - HALF, HALF),
        ("keep", plan.kept, LINE - FULL, FULL),
    )
    for action, entries, top, height in kinds:
        marks = [(at(entry.row.step), _colour(plan, entry), _tooltip(entry) if tooltips else None) for entry in entries]
        yield f'<g class="{action}">'
        yield from _bars(marks, top, height, width)
        yield "</g>"
    yield '<g class="pinned">'
    for x in dict.fromkeys(round(at(entry.row.step), 1) for entry in plan.entries if entry.row.pinned):
        yield _diamond(x, LINE - FULL - 8)
    yield "</g>"


def _rules(plan: Plan, rows: Sequence[str], at: Callable[[int], float], width: float) -> Iterator[str]:
    """Draw a row for each rule with all checkpoints that it keeps. One kept by several rules is in several rows."""
    keeps: dict[str, list[float]] = {rule: [] for rule in rows}
    for entry in (*plan.kept, *plan.thinned):
        # A checkpoint kept for safety in several ways has several reasons of that name: draw it once.
        for rule in dict.fromkeys(reason.rule for reason in entry.reasons):
            keeps.setdefault(rule, []).append(at(entry.row.step))
    for number, rule in enumerate(rows):
        y, colour = LINE + HALF + 26 + ROW * number, _rule_colour(plan, rule)
        short = rule if len(rule) <= LABEL_CHARACTERS else rule[: LABEL_CHARACTERS - 1] + "…"
        yield f'<g class="rule"><title>{text.escaped(rule)}: {text.count(len(keeps[rule]), "checkpoint")}</title>'
        yield _words(LEFT - 14, y + 10, short, end=True, size=11)
        yield _words(WIDTH - 8, y + 10, f"{len(keeps[rule]):,}", end=True, size=11)
        yield f'<line x1="{LEFT - 8}" x2="{RIGHT + 8}" y1="{y + 13}" y2="{y + 13}" stroke="{INK}" opacity="0.3"/>'
        yield from _bars([(x, colour, None) for x in keeps[rule]], y, 13, width)
        yield "</g>"


def _legend() -> Iterator[str]:
    first, second = LINE - FULL + 18, LINE
    yield '<g class="legend">'
    for x, y in ((16, first), (16, second), (94, second)):
        yield f'<line x1="{x - 8}" x2="{x + 8}" y1="{y}" y2="{y}" stroke="{INK}"/>'
    yield from _bars([(16, COLOURS[0], None)], first - 18, 18, 6)
    yield _words(30, first, "kept, in the colour of its first rule", size=11)
    yield from _bars([(16, COLOURS[0], None)], second - 9, 9, 6)
    yield _words(30, second + 2, "thinned", size=11)
    yield from _bars([(94, INK, None)], second, 9, 6)
    yield _words(108, second + 2, "deleted", size=11)
    yield _diamond(170, second - 2)
    yield _words(180, second + 2, "pinned", size=11)
    yield "</g>"


def _axis(plan: Plan, at: Callable[[int], float], bottom: float) -> Iterator[str]:
    steps = [entry.row.step for entry in plan.entries]
    if not steps:
        return
    yield '<g class="axis">'
    for step in _round_steps(steps[0], steps[-1]):
        x = at(step)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{LINE}" y2="{bottom - 10:.0f}" stroke="{INK}" opacity="0.2"/>'
        yield _words(x, bottom + 6, f"{step:,}", middle=True, size=11)
    yield _words((LEFT + RIGHT) / 2, bottom + 24, "step", middle=True, size=11)
    yield "</g>"


def _round_steps(first: int, last: int) -> list[int]:
    """Return at most seven round numbers within the range; the only number if the range has just one."""
    if first == last:
        return [first]
    width = 1
    while (last - first) / width > 6:
        # 1, 2, 5, 10, 20, 50, ...
        width = width * 5 // 2 if str(width)[0] == "2" else width * 2
    return list(range(-(-first // width) * width, last + 1, width))


def _bars(marks: Iterable[tuple[float, str, str | None]], top: float, height: float, width: float) -> Iterator[str]:
    """Draw bars of one height.

    Bars without a tooltip are one path per colour with each position once, so that many of them stay a small file.
    """
    silent: dict[str, dict[float, None]] = {}
    for x, colour, words in marks:
        if words is None:
            silent.setdefault(colour, {})[round(2 * x) / 2] = None
        else:
            shape = f'x="{x - width / 2:.1f}" y="{top:.0f}" width="{width:.1f}" height="{height:.0f}"'
            yield f'<rect {shape} fill="{colour}"><title>{text.escaped(words)}</title></rect>'
    for colour, places in silent.items():
        path = "".join(f"M{x:g} {top:g}v{height:g}" for x in places)
        yield f'<path d="{path}" stroke="{colour}" stroke-width="{width:.1f}"/>'


def _diamond(x: float, y: float) -> str:
    return f'<path d="M{x:g} {y - 6:g}l5 6l-5 6l-5 -6z" fill="none" stroke="{INK}" stroke-width="2"/>'


def _words(
    x: float, y: float, words: str, *, size: int = 12, bold: bool = False, middle: bool = False, end: bool = False
) -> str:
    anchor = ' text-anchor="middle"' if middle else ' text-anchor="end"' if end else ""
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.0f}" font-size="{size}" fill="{INK}"{anchor}{weight}>{text.escaped(words)}</text>'


def _colour(plan: Plan, entry: Entry) -> str:
    """Return the colour of the first of the policy's rules that keeps the checkpoint."""
    return next((_rule_colour(plan, reason.rule) for reason in entry.reasons if reason.rule != _SAFETY), INK)


def _rule_colour(plan: Plan, rule: str) -> str:
    return COLOURS[plan.rules.index(rule) % len(COLOURS)] if rule in plan.rules else INK


def _tooltip(entry: Entry) -> str:
    why = "; ".join(map(str, entry.reasons)) if entry.reasons else f"nearest: {entry.miss}"
    return f"step {entry.row.step}, {_WORDS[entry.action]}: {why}"


def _description(plan: Plan, summary: str) -> str:
    """Describe the picture in words, for readers who cannot see it."""
    pinned = [entry for entry in plan.entries if entry.row.pinned]
    sentences = [summary]
    for word, entries in (("Kept", plan.kept), ("Thinned", plan.thinned), ("Pinned", pinned)):
        if entries:
            sentences.append(f"{word}: steps {first_of([entry.row.step for entry in entries], 20)}")
    return ". ".join(sentences) + "."
