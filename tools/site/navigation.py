"""The navigation of the site, read from the index of the documents: docs/README.md stays its only list."""

from __future__ import annotations

import re
from typing import Any

_SECTION = re.compile(r"^## (?P<title>[^:\n]+)[^\n]*\n(?P<body>.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_ITEM = re.compile(r"^- (?P<text>(?:.*\n?)(?:  .*\n?)*)", re.MULTILINE)
_LINK = re.compile(r"\]\((?P<page>[^)#\s]+\.md)(?:#[^)]*)?\)")
_GROUP = re.compile(r"(?P<title>[^:\[\]]+): \[")


def sections(index: str) -> dict[str, list[Any]]:
    """Return the pages of each section of the index, each page where it is first linked without an anchor.

    An item that begins with a name and a colon before its links, as in `- Stores: [Amazon S3](s3.md), ...`, is a group
    of that name.
    """
    # A page that one section explains and another one only points into belongs to the first.
    linked = set(re.findall(r"\]\(([^)#\s]+\.md)\)", index))
    seen: set[str] = set()
    found: dict[str, list[Any]] = {}
    for section in _SECTION.finditer(index):
        entries: list[Any] = []
        for item in _ITEM.finditer(section["body"]):
            pages = []
            for link in _LINK.finditer(item["text"]):
                page = link["page"]
                if page in seen or (page in linked and link[0].partition("#")[1]):
                    continue
                seen.add(page)
                pages.append(page)
            group = _GROUP.match(item["text"])
            entries += [{group["title"]: pages}] if group is not None and pages else pages
        found[section["title"].strip()] = entries
    return found
