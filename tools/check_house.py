"""Checks the house rules of the package: sizes of files and folders, one class name for one thing, plain docstrings.

And names of tests: they begin with a verb, are short, and are used once in a file.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "bucketpoint"
TESTS = ROOT / "tests"

MOST_LINES = 420
MOST_LINES_OF_ONE_CLASS = 600
"""A class is not cut in two for its length alone."""

MOST_FILES = 16
MOST_LETTERS = 80
"""Of the name of a test."""

_RIDDLE = re.compile(r"(What|Where|Whether|Who|Whoever|Whose|How)\b")
_DISCLAIMER = re.compile(
    r"(No|Not|Never|Nothing|Knows|Asks|Makes|Needs|Loads|Reads|Sends|Sets|Sums|Text|Data|Pure|Code|Thin)\b"
    r"[^.:]*\b(no|not|nothing|nobody|none|only|alone|I/O|requests|tensors|functions|arithmetic)\b[^.:]*\.?$"
)
_NO_VERB = re.compile(
    r"test_(an?|the|its?|this|that|these|those|each|every|any|all|both|no|not|never|nothing|none|nobody|one|two|other|another|"
    r"what|which|who|whoever|where|when|so|of|in|on|at|by|for|from|to|with|without|within|after|before|behind|under|over|"
    r"during|between|[0-9]+)_"
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


def names_of_tests(folder: Path = TESTS) -> Iterator[str]:
    """Name each test whose name does not begin with a verb, is too long or is used twice in its file."""
    known: set[str] = set()
    for path in sorted(folder.rglob("*.py")):
        here: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or not node.name.startswith("test_"):
                continue
            place = f"{path.relative_to(folder.parent)}:{node.lineno}: {node.name}"
            if _NO_VERB.match(node.name):
                yield f"{place}: the name of a test begins with a verb, as `test_refuses_a_damaged_index`"
            if len(node.name) > MOST_LETTERS:
                yield f"{place}: {len(node.name)} letters; at most {MOST_LETTERS}"
            if node.name in here:
                yield f"{place}: another test of this file has this name"
            here.add(node.name)
        known |= here
    tiers = folder / "tiers.py"
    for name in re.findall(r'^    "(test_\w+)":', tiers.read_text(encoding="utf-8"), re.M) if tiers.exists() else ():
        if name not in known:
            yield f"tests/tiers.py: no test is called {name}"


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
    found = [*faults(), *names_of_tests()]
    for fault in found:
        print(fault)
    print(f"{len(found)} faults")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
