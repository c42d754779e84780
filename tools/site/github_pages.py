"""Pages as GitHub shows them, made ready for MkDocs: links that leave docs/, nested lists, anchors of headings."""

from __future__ import annotations

import posixpath
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

_FENCE = re.compile(r"^(?P<indent> *)(?P<marks>`{3,}|~{3,})")
_INDENT = re.compile(r"^ +", re.MULTILINE)
# A code span is matched as a whole: what looks like a link in it is none.
_LINK = re.compile(r"(`+)(?:(?!\1).)*?\1(?!`)|(?<=\]\()(?P<target>[^)\s`]+)(?=\))", re.DOTALL)
_HEADING = re.compile(r"^(#{1,5} )", re.MULTILINE)


def slug(heading: str, separator: str = "-") -> str:
    """Return the anchor that GitHub gives to a heading, so that links to it work in both places."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def blocks(text: str) -> Iterator[tuple[bool, str]]:
    """Yield the text in pieces: True with a fenced block, False with what is between two of them."""
    lines: list[str] = []
    marks = ""
    for line in text.splitlines(keepends=True):
        fence = _FENCE.match(line)
        if not marks and fence is not None:
            yield False, "".join(lines)
            lines, marks = [line], fence["marks"]
        elif marks and fence is not None and fence["marks"].startswith(marks) and line.strip() == fence["marks"]:
            yield True, "".join([*lines, line])
            lines, marks = [], ""
        else:
            lines.append(line)
    yield bool(marks), "".join(lines)


def deeper_lists(text: str) -> str:
    """Double the indentation outside of code: Python-Markdown nests a list at four spaces, GitHub at two."""
    return "".join(_deeper(fenced, block) for fenced, block in blocks(text))


def _deeper(fenced: bool, block: str) -> str:
    if not fenced:
        return _INDENT.sub(r"\g<0>\g<0>", block)
    # A fence inside a list item moves with the item; what it holds keeps its shape.
    return textwrap.indent(block, block[: -len(block.lstrip(" "))])


def lower_headings(text: str) -> str:
    """Put each heading one level lower, for a text that becomes a part of another page."""
    return "".join(block if fenced else _HEADING.sub(r"#\1", block) for fenced, block in blocks(text))


def with_links(text: str, source: str, page: str, pages: Mapping[str, str], root: Path, repository: str) -> str:
    """Rewrite the links of a page that name files of the repository.

    Args:
        text: Markdown of the page.
        source: path of its file in the repository, from which its links are relative.
        page: path of the page in the site, such as `security.md`.
        pages: path in the site of each file of the repository that is a page or lies beside one.
        root: folder of the repository.
        repository: URL of the repository with the branch or tag to link to in place of `{}`: `.../{}/main`.

    Returns:
        The text. A link to a page leads to that page, one to another file or folder to the repository. A link that
        leads nowhere stays as it is, so that MkDocs reports it.
    """

    def target_of(link: re.Match[str]) -> str:
        target, hash_sign, anchor = (link["target"] or "").partition("#")
        if not target or re.match(r"[a-z][a-z0-9+.-]*:|/", target):
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if path in pages:
            return posixpath.relpath(pages[path], posixpath.dirname(page) or ".") + hash_sign + anchor
        if path.startswith("..") or not (root / path).exists():
            return link[0]
        return repository.format("tree" if (root / path).is_dir() else "blob") + f"/{path}{hash_sign}{anchor}"

    return "".join(block if fenced else _LINK.sub(target_of, block) for fenced, block in blocks(text))
