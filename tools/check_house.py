"""Checks the house rules of the package: sizes of files and folders, one class name for one thing, plain docstrings."""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "bucketpoint"

MOST_LINES = 420
MOST_LINES_OF_ONE_CLASS = 600
"""A class is not cut in two for its length alone."""

MOST_FILES = 16

_RIDDLE = re.compile(r"(What|Where|Whether|Who|Whoever|Whose|How)\b")
_DISCLAIMER = re.compile(
    r"(No|Not|Never|Nothing|Knows|Asks|Makes|Needs|Loads|Reads|Sends|Sets|Sums|Text|Data|Pure|Code|Thin)\b"
    r"[^.:]*\b(no|not|nothing|nobody|none|only|alone|I/O|requests|tensors|functions|arithmetic)\b[^.:]*\.?$"
)


def faults() -> Iterator[str]:
    """Name each place that breaks a rule."""
    classes: dict[str, list[str]] = defaultdict(list)
    folders: dict[Path, int] = defaultdict(int)
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(ROOT))
        text = path.read_text(encoding="utf-8")
        folders[path.parent] += 1
        lines = text.count("\n")
        tree = ast.parse(text)
        one_class = sum(isinstance(node, ast.ClassDef) for node in tree.body) == 1
        most = MOST_LINES_OF_ONE_CLASS if one_class else MOST_LINES
        if lines > most:
            yield f"{name}: {lines} lines; at most {most}"
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(f"{name}:{node.lineno}")
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                yield from _docstring_faults(node, name)
    for folder, count in folders.items():
        if count > MOST_FILES:
            yield f"{folder.relative_to(ROOT)}: {count} files; at most {MOST_FILES}"
    for label, places in classes.items():
        if len(places) > 1:
            yield f"{places[1]}: another class is called {label}: {places[0]}"


def _docstring_faults(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str
) -> Iterator[str]:
    docstring = ast.get_docstring(node)
    if docstring is None:
        return
    line = node.body[0].lineno
    riddle = _RIDDLE.match(docstring)
    if riddle is not None:
        yield f"{name}:{line}: a docstring begins with a verb or a noun, not with {riddle[0]!r}"
    if isinstance(node, ast.Module):
        last = re.split(r"(?<=\.)\s+", docstring.split("\n\n")[0].replace("\n", " ").strip())[-1]
        if last != docstring.strip() and _DISCLAIMER.match(last):
            yield f"{name}:{line}: the imports' lint says this better: {last!r}"


def main() -> int:
    found = list(faults())
    for fault in found:
        print(fault)
    print(f"{len(found)} faults")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
