"""Lines of text that describe a run at one moment: the frame of `watch`, made from its document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bucketpoint.cli import text
from bucketpoint.errors import first_of

LATE = 2.0
"""Multiple of the usual time between saves after which the next checkpoint counts as late."""

LATE_S = 60.0
"""Seconds before which no checkpoint counts as late."""

ENDED, ENDED_S = 10.0, 3600.0
"""Multiple and seconds after which a run counts as ended: a bucket does not show whether a job still runs."""

NAMED = 6
"""Limit on the steps that a line names."""

_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))
_DONE = {"delete": "deleted", "thin": "thinned"}


def duration(seconds: float) -> str:
    """Format a length of time by its two largest units: `2 d 4 h`, `12 min 3 s`, `45 s`."""
    left = max(int(seconds), 0)
    parts: list[str] = []
    for size, unit in _UNITS:
        number, left = divmod(left, size)
        if number or parts or unit == "s":
            parts.append(f"{number} {unit}")
    return " ".join(part for part in parts[:2] if not part.startswith("0 ") or len(parts) == 1)


def took(seconds: float) -> str:
    """Format the duration of a save: to a tenth of a second below a minute."""
    return f"{seconds:.1f} s" if seconds < 59.95 else duration(seconds)


def lines(document: Mapping[str, Any], now: float) -> Iterator[str]:
    """Yield a frame as plain lines."""
    return (line for _, line in frame(document, now))


def frame(document: Mapping[str, Any], now: float, rows: int | None = None) -> Iterator[tuple[str, str]]:
    """Yield the lines of a frame, each with its style on a screen. `rows` limits the number of checkpoints."""
    shown = document["checkpoints"][:rows]
    yield "bold", f"{title(document)}  {text.when(document['taken'])}"
    yield _style_of_newest(document, now), headline(document, now)
    yield from (("dim", line) for line in details(document, now))
    if document["attempts"]:
        yield "", ""
        yield from (("cyan", line) for line in attempt_lines(document, now))
    if document["checkpoints"]:
        yield "", ""
        head = ("step", "age", "kind", "size", "metrics", "")
        styles = ["dim", *("dim" if row["tombstone"] or row.get("action") == "delete" else "" for row in shown)]
        yield from zip(styles, text.table([head, *(row_cells(row, now) for row in shown)], indent=0), strict=True)
        more = document["count"] - len(shown)
        older = f"and {text.count(more, 'older checkpoint')}; " if more else ""
        yield "dim", f"{older}{text.size(document['bytes'])} in all"
    if prune := list(prune_lines(document, now)):
        yield "", ""
        yield from (("", line) for line in prune)
    if notes := list(notices(document)):
        yield "", ""
        yield from (("yellow", note) for note in notes)


def _style_of_newest(document: Mapping[str, Any], now: float) -> str:
    if document["newest"] is None:
        return "bold red"
    if is_ended(document, now):
        return "dim"
    return "bold yellow" if is_late(document, now) else "bold green"


def title(document: Mapping[str, Any]) -> str:
    return f"{document['root']}{' (run ' + document['run'] + ')' if document['run'] else ''}"


def headline(document: Mapping[str, Any], now: float) -> str:
    """Return a line with the newest whole checkpoint and its age."""
    newest = document["newest"]
    if newest is None:
        return "no whole checkpoint: a crash now loses all of the training"
    return f"newest whole checkpoint: step {newest['step']}, {age(newest, now)} old"


def age(row: Mapping[str, Any], now: float) -> str:
    return duration(now - row["created"])


def is_late(document: Mapping[str, Any], now: float) -> bool:
    """Return True if the next checkpoint is overdue by the usual time between saves, and the run has not ended."""
    return _is_older(document, now, LATE, LATE_S) and not is_ended(document, now)


def is_ended(document: Mapping[str, Any], now: float) -> bool:
    """Return True if saves stopped long ago, and none is under way."""
    return _is_older(document, now, ENDED, ENDED_S) and not any(save["live"] for save in document["attempts"])


def _is_older(document: Mapping[str, Any], now: float, times: float, least: float) -> bool:
    newest, gap = document["newest"], document["interval_s"]
    return newest is not None and gap is not None and now - newest["created"] > max(times * gap, least)


def details(document: Mapping[str, Any], now: float) -> Iterator[str]:
    newest, gap = document["newest"], document["interval_s"]
    if newest is None:
        return
    amount = text.size(newest["bytes"])
    amount += f" in {text.count(newest['objects'], 'object')}" if newest["objects"] is not None else ""
    amount += f", its save took {took(newest['seconds'])}" if newest["seconds"] is not None else ""
    ended = is_ended(document, now)
    loses = "committed" if ended else "a crash now loses the training since then: committed"
    yield f"{loses} {text.when(newest['created'])}, {amount}"
    if gap is not None:
        late = ": the next one is late" if is_late(document, now) else ""
        late = f", and there was none for {age(newest, now)}: the run has ended" if ended else late
        yield f"the last saves were {duration(gap)} apart{late}"


def attempt_lines(document: Mapping[str, Any], now: float) -> Iterator[str]:
    """Yield a line for each save that may be alive, and one line for all others."""
    dead = []
    for save in document["attempts"]:
        if save["live"]:
            yield f"a save of step {save['step']} is not committed: {progress(save, document['newest'], now)}"
        else:
            dead.append(save["step"])
    if dead:
        what = "a save is" if len(dead) == 1 else f"{len(dead)} saves are"
        yield (
            f"{what} dead for two days or more: step {first_of(dead, NAMED)}; "
            f"`bucketpoint gc {document['arguments']}` removes the remains"
        )


def progress(save: Mapping[str, Any], newest: Mapping[str, Any] | None, now: float) -> str:
    """Describe the progress of a save, compared with the newest checkpoint."""
    began = "began at an unknown time" if save["started"] is None else f"began {duration(now - save['started'])} ago"
    if save["token"] is None:
        began += ", by a writer without a log" if save["started"] is not None else ""
    if save["objects"] is None:
        return began
    if not save["objects"]:
        return f"{began}, no whole object is in the store yet"
    words = [began, f"{_of(save, newest)} in the store"]
    if save["latest"] is not None:
        words.append(f"the last one {duration(now - save['latest'])} ago")
    return ", ".join(words)


def _of(save: Mapping[str, Any], newest: Mapping[str, Any] | None) -> str:
    if newest is None or not newest["bytes"]:
        return f"{text.count(save['objects'], 'object')}, {text.size(save['bytes'])}"
    objects = f"{save['objects']:,}" + (f" of {newest['objects']:,}" if newest["objects"] is not None else "")
    part = f"{save['bytes'] / newest['bytes']:.0%}"
    return f"{objects} objects, {text.size(save['bytes'])} of {text.size(newest['bytes'])} ({part})"


def row_cells(row: Mapping[str, Any], now: float) -> tuple[str, ...]:
    """Return a checkpoint's cells: step, age, kind, size, metrics, and why it is kept or deleted."""
    metrics = " ".join(
        f"{name}={f'{value:.6g}' if isinstance(value, float) else value}" for name, value in row["metrics"].items()
    )
    return str(row["step"]), age(row, now), row["kind"], text.size(row["bytes"]), metrics, "; ".join(fate(row, now))


def fate(row: Mapping[str, Any], now: float) -> list[str]:
    """Return texts about a checkpoint's future: the rules that keep it, its holds, its tombstone."""
    words: list[str] = []
    rules = [rule for rule in row.get("kept_by", ()) if rule != "safety"]
    if row.get("action") == "keep":
        words.append(f"kept by {', '.join(rules)}" if rules else "kept for safety")
    elif row.get("action") == "thin":
        words.append(f"thinned to its weights by {', '.join(rules)}" if rules else "thinned to its weights")
    elif row.get("action") == "delete" and not row["tombstone"]:
        words.append("kept by no rule")
    words += row["held"]
    if row["tombstone"]:
        words.append(f"to be {_DONE[row['tombstone']['action']]} {_due(row['tombstone']['due'], now)}")
    return words


def prune_lines(document: Mapping[str, Any], now: float) -> Iterator[str]:
    """Yield lines about the next prune. Without a policy: only the pending tombstones."""
    policy = document["policy"]
    if policy is None:
        if document["waiting"]:
            yield "checkpoints with a tombstone:"
            yield from _later(document["waiting"], now)
        return
    waiting, tombstones = policy["waiting"], policy["tombstones"]
    due = [stone for stone in waiting if stone["due"] <= now or stone["is_due"]]
    later = [stone for stone in waiting if stone not in due]
    at = "after the next save" if policy["when"] == "after_commit" else "which somebody has to start"
    yield f"the next prune, {at}:"
    for action, done in _DONE.items():
        ready = [stone for stone in due if stone["action"] == action]
        marked = [stone for stone in tombstones if stone["action"] == action]
        if not policy["grace_s"]:
            ready, marked = ready + marked, []
        if ready:
            freed = f", {text.size(sum(one['bytes'] for one in ready))}" if action == "delete" else ""
            yield f"  {_steps(ready)}: {done}{freed}"
        if marked:
            yield f"  {_steps(marked)}: to get a tombstone, {done} {duration(policy['grace_s'])} later"
    if policy["withdrawn"]:
        yield f"  {_steps(policy['withdrawn'])}: the tombstone is withdrawn"
    if not (waiting or tombstones or policy["withdrawn"]):
        yield "  nothing to do"
    yield from _later(later, now)
    if not policy["allowed"]:
        yield f"  REFUSED: {policy['verdict']}, so a prune deletes or thins only {policy['unasked']}"


def _later(waiting: Sequence[Mapping[str, Any]], now: float) -> Iterator[str]:
    for moment, action in sorted({(stone["due"], stone["action"]) for stone in waiting}):
        stones = [stone for stone in waiting if (stone["due"], stone["action"]) == (moment, action)]
        yield f"  {_steps(stones)}: {_DONE[action]} {_due(moment, now)}"


def notices(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line about each problem of the run."""
    for problem in document["problems"]:
        yield f"PROBLEM: {problem}"
    if document["policy"] is not None:
        yield from document["policy"]["unreported"].values()
        yield from document["policy"]["future"]
        if document["unrecorded"]:
            yield f"{text.count(document['unrecorded'], 'checkpoint')} without a record, which no policy deletes"


def _steps(some: Sequence[Mapping[str, Any]]) -> str:
    return f"step {first_of([one['step'] for one in some], NAMED)}"


def _due(due: float, now: float) -> str:
    return "at the next prune" if due <= now else f"after {text.when(due)}, in {duration(due - now)}"
