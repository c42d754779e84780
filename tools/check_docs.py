"""Checks the documents: links, anchors and rooms exist, every example parses, and imports what it uses."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import yaml

ROOT = Path(__file__).resolve().parent.parent

sys.path.insert(0, str(ROOT / "tools" / "site"))

import github_pages  # noqa: E402

PACKAGE = ROOT / "src" / "bucketpoint"

# Names of rooms and files, as docs/architecture.md writes them.
_ROOM = re.compile(r"`((?:\w+/)+\w+)/?`")

# An example may be the inside of a coroutine.
_PARSE = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT

_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)")
_HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$", re.MULTILINE)


def _imported(tree: ast.AST) -> Iterator[str]:
    """Yield the names that an example imports or defines itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.FunctionDef):
            yield from (node.name, *(argument.arg for argument in node.args.args))


def _public_names() -> set[str]:
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    (names,) = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return {str(node.value) for node in ast.walk(names) if isinstance(node, ast.Constant)}


_IMPORTABLE = {"torch", "dcp", "dist", "bucketpoint"} | _public_names()
"""Names in examples that somebody who pastes them has to import."""


def documents() -> Iterator[Path]:
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "bench/**/*.md", "terraform/**/*.md"):
        yield from sorted(ROOT.glob(pattern))


def faults(document: Path) -> Iterator[str]:
    text = document.read_text(encoding="utf-8")
    imported: set[str] = set()
    for fence in _FENCE.finditer(text):
        line = text.count("\n", 0, fence.start()) + 1
        if fence[1] in ("python", "py"):
            try:
                tree = compile(fence[2], str(document), "exec", flags=_PARSE)
            except SyntaxError as error:
                yield f"{line + (error.lineno or 0)}: the example does not compile: {error.msg}"
                continue
            imported |= set(_imported(tree))
            missing = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & _IMPORTABLE - imported
            for name in sorted(missing):
                yield f"{line}: neither this example nor one above it imports {name}"
        elif fence[1] == "json":
            try:
                json.loads(fence[2])
            except ValueError as error:
                yield f"{line}: the example is not JSON: {error}"
        elif fence[1] in ("yaml", "yml"):
            try:
                yaml.safe_load(fence[2])
            except yaml.YAMLError as error:
                yield f"{line}: the example is not YAML: {error}"
    prose = _FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text)
    for link in _LINK.finditer(prose):
        target, _, anchor = unquote(link[1]).partition("#")
        line = prose.count("\n", 0, link.start()) + 1
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        path = (document.parent / target) if target else document
        if not path.exists():
            yield f"{line}: {link[1]} leads nowhere"
        elif anchor and path.suffix == ".md" and anchor not in anchors(path):
            yield f"{line}: {link[1]} names no heading"
    if document.name == "architecture.md":
        for room in _ROOM.finditer(prose):
            place = room[1]
            if not any(path.exists() for path in (PACKAGE / place, PACKAGE / f"{place}.py", ROOT / place)):
                yield f"{prose.count(chr(10), 0, room.start()) + 1}: there is no {room[1]}"


def anchors(document: Path) -> set[str]:
    """The anchors that GitHub makes of the headings."""
    text = _FENCE.sub("", document.read_text(encoding="utf-8"))
    return set(map(github_pages.slug, _HEADING.findall(text)))


def main() -> int:
    found = [f"{document.relative_to(ROOT)}:{fault}" for document in documents() for fault in faults(document)]
    for fault in found:
        print(fault)
    print(f"{sum(1 for _ in documents())} documents, {len(found)} faults")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
