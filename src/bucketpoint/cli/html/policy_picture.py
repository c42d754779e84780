"""The picture of a plan on a page: whole where there is room, and cut into strips between lines of text on a phone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from bucketpoint.cli import text
from bucketpoint.cli.html.markup import Markup, element, joined
from bucketpoint.cli.plot import FULL, HALF, LEFT, LINE, RIGHT, ROW, svg

if TYPE_CHECKING:
    from bucketpoint.retention import Plan

_MARGIN = 10.0
"""Room beside the first and the last step, whose bars reach beyond their position."""

_RULE = re.compile(r'<g class="rule">.*?<line [^>]*y1="([\d.]+)"', re.DOTALL)


def picture(plan: Plan, title: str) -> Markup:
    """Draw a plan. The strips show parts of the same drawing, without its words."""
    whole = svg(plan, title)
    head, inner = whole[: whole.index(">") + 1], whole[whole.index(">") + 1 : whole.rindex("</svg>")]
    drawing = Markup(f'{head}<g id="plan">{inner}</g></svg>')
    bottoms = [float(bottom) for bottom in _RULE.findall(inner)]
    return joined([element("div", drawing, class_="plan"), element("div", *_strips(plan, bottoms), class_="strips")])


def _strips(plan: Plan, bottoms: list[float]) -> Iterator[Markup]:
    counts = f"{len(plan.kept)} kept, {len(plan.thinned)} thinned, {len(plan.deleted)} deleted"
    yield element("p", f"All checkpoints: {counts}")
    yield _strip(LINE - FULL - 16, LINE + HALF + 2)
    yield element("p", "tall: kept; short: thinned; below the line: deleted; diamond: pinned", class_="quiet")
    keeps = dict.fromkeys([*plan.rules, "safety"], 0)
    for entry in (*plan.kept, *plan.thinned):
        for rule in dict.fromkeys(reason.rule for reason in entry.reasons):
            keeps[rule] = keeps.get(rule, 0) + 1
    for (rule, number), bottom in zip(keeps.items(), bottoms, strict=False):
        yield element("p", f"{rule}: {text.count(number, 'checkpoint')}")
        yield _strip(bottom - ROW + 5, bottom + 2)
    steps = [entry.row.step for entry in plan.entries]
    if steps:
        ends = dict.fromkeys([f"step {steps[0]:,}", f"step {steps[-1]:,}"])
        yield element("div", *(element("span", end) for end in ends), class_="axis")


def _strip(top: float, bottom: float) -> Markup:
    left, width = LEFT - _MARGIN, RIGHT - LEFT + 2 * _MARGIN
    box = f"{left:g} {top:g} {width:g} {bottom - top:g}"
    return element("svg", element("use", href="#plan"), viewBox=box, aria_hidden="true")
