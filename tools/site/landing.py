"""The first page of the site: the beginning of README.md, its figures, and the index of the documents."""

from __future__ import annotations

import re

import github_pages

_BUTTONS = """
[Quick start](docs/quickstart.md){ .md-button .md-button--primary }
[All documents](#documents){ .md-button }
"""
_DOCSTRINGS = "\n- [Every public name with its docstring](reference/saving.md), also those of integrations."
_FIGURE = "![CPU and wall time of a save and of a load, for each library](docs/benchmark.svg)"


class ReadmeError(Exception):
    """README.md no longer has a part that the first page of the site takes from it."""


def page(readme: str, index: str) -> str:
    """Return the Markdown of the page, with links as README.md has them.

    Args:
        readme: text of README.md.
        index: text of docs/README.md, its links already as README.md would have them.
    """
    title, _, rest = readme.partition("\n")
    intro = rest.strip().partition("\n\n")[0]
    parts = [
        title,
        intro,
        _BUTTONS.strip(),
        _section(readme, "In ten lines"),
        _until_table(_section(readme, "Benchmark")),
        _FIGURE,
        "The [benchmark](docs/benchmark.md) has the figures, their intervals, and how to repeat them.",
        "## Documents",
        '<div class="kinds" markdown>',
        *(f"<div markdown>\n\n{part}\n\n</div>" for part in _parts(index)),
        "</div>",
    ]
    return "\n\n".join(parts) + "\n"


def _section(text: str, heading: str) -> str:
    found = re.search(rf"^## {re.escape(heading)}\n.*?(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ReadmeError(f"README.md has no section {heading!r}, which the first page of the site shows")
    return found[0].strip()


def _until_table(section: str) -> str:
    found = re.match(r".*?^\|.*?(?=^(?!\|)|\Z)", section, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ReadmeError("The section Benchmark of README.md has no table, which the first page of the site shows")
    return found[0].strip()


def _parts(index: str) -> list[str]:
    parts = [part.strip() for part in re.split(r"(?=^## )", index, flags=re.MULTILINE)[1:]]
    # Only the site has these pages.
    return [github_pages.lower_headings(part + _DOCSTRINGS * part.startswith("## Reference")) for part in parts]
