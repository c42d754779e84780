"""What is made of a page of GitHub: links, nested lists, the navigation, joint entries of docstrings.

And the check of the reference, which finds what a docstring leaves out, and no more.
"""

from __future__ import annotations

import html
import os
import re
import sys
from pathlib import Path
from urllib.parse import unquote

import griffe
import pytest
from markdown_it import MarkdownIt

import check_reference

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools" / "site"))

import github_pages  # noqa: E402
import griffe_docstrings  # noqa: E402
import navigation  # noqa: E402
import reference_pages  # noqa: E402

OUTSIDE = {"CHANGELOG.md": "changelog", "SECURITY.md": "security", "terraform/README.md": "terraform"}
SOURCES = [path for path in sorted((ROOT / "docs").glob("*.md")) if path.name != "README.md"]
SOURCES += [ROOT / name for name in OUTSIDE]

PAGES = {"docs/saving.md": "saving.md", "SECURITY.md": "security.md"}


def linked(text: str, source: str = "docs/x.md") -> str:
    return github_pages.with_links(text, source, "x.md", PAGES, ROOT, "https://host/repo/{}/v1")


def test_leads_every_link_within_the_built_site_to_a_file_and_an_anchor() -> None:
    site = ROOT / "build" / "site"
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("index.html")}
    anchors = {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in pages.items()}
    faults = []
    for path, text in pages.items():
        for link in set(re.findall(r'\b(?:href|src)="([^"]+)"', text)):
            target, _, anchor = html.unescape(link).partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            place = Path(os.path.normpath(path.parent / target)) if target else path
            place = place / "index.html" if place.is_dir() else place
            if not place.is_file() or (anchor and place in anchors and unquote(anchor) not in anchors[place]):
                faults.append(f"{path.parent.relative_to(site)}: {link}")
    assert len(pages) > 40
    assert faults == []


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_renders_the_lists_tables_and_code_of_a_page_that_github_shows(source: Path) -> None:
    page = OUTSIDE.get(str(source.relative_to(ROOT)), source.stem)
    built = (ROOT / "build" / "site" / page / "index.html").read_text(encoding="utf-8")
    article = built[built.index("<article") : built.index("</article>")]
    on_github = MarkdownIt("commonmark").enable("table").render(source.read_text(encoding="utf-8"))
    tags = ("h1", "h2", "h3", "li", "tr", "pre", "code", "em", "strong", "img")
    for tag in tags:
        assert (tag, article.count(f"<{tag}>") + article.count(f"<{tag} ")) == (
            tag,
            on_github.count(f"<{tag}>") + on_github.count(f"<{tag} "),
        )


def test_leads_links_to_pages_or_to_the_repository_at_the_version_or_leaves_them() -> None:
    assert linked("[a](../SECURITY.md#reporting)") == "[a](security.md#reporting)"
    assert linked("[a](docs/saving.md)", "README.md") == "[a](saving.md)"
    assert linked("[`a`](../Makefile)") == "[`a`](https://host/repo/blob/v1/Makefile)"
    assert linked("[a](../policies)") == "[a](https://host/repo/tree/v1/policies)"
    for text in (
        "[a](../no.md)",
        "[a](#here)",
        "[a](https://x.y/z)",
        "`[a](../SECURITY.md)`",
        "```\n[a](../Makefile)\n```\n",
    ):
        assert linked(text) == text


def test_indents_a_nested_list_as_python_markdown_wants_it_and_no_code() -> None:
    given = "- a\n  more\n  - b\n\n```yaml\n- a:\n  - b\n```\n- c\n\n  ```\n  x\n    y\n  ```\n"
    assert github_pages.deeper_lists(given) == (
        "- a\n    more\n    - b\n\n```yaml\n- a:\n  - b\n```\n- c\n\n    ```\n    x\n      y\n    ```\n"
    )


def test_makes_githubs_anchor_of_a_heading() -> None:
    assert github_pages.slug("`restore(state)`: what, and *why*") == "restorestate-what-and-why"


def test_makes_the_navigation_of_the_index_with_each_page_once() -> None:
    index = """# Documents

## How-to: one task each

- Stores: [S3](s3.md), [R2](r2.md).
- [Prune from cron](retention.md#pruning-from-cron).

## Reference: look it up

- [Policies](retention.md), [stores](s3.md#services).
"""
    assert navigation.sections(index) == {"How-to": [{"Stores": ["s3.md", "r2.md"]}], "Reference": ["retention.md"]}


def test_splits_an_entry_that_parameters_share() -> None:
    given = "Do.\n\nArgs:\n    a, b: text\n        more\n    c: d, e: f\n\nReturns:\n    x, y: z\n"
    assert griffe_docstrings.apart(given) == (
        "Do.\n\nArgs:\n    a: text\n        more\n    b: text\n        more\n    c: d, e: f\n\nReturns:\n    x, y: z\n"
    )


def test_takes_the_text_of_a_setting_from_its_annotation() -> None:
    assert griffe_docstrings.annotated_text("Annotated[int, WholeNumber(1), 'so many']") == "so many"
    assert griffe_docstrings.annotated_text("Annotated[int, WholeNumber(1)]") is None
    assert griffe_docstrings.annotated_text("int | None") is None


def test_treats_a_plain_word_as_a_name_only_on_the_page_of_its_entry() -> None:
    ours = reference_pages.ReferencePage("reference/saving.md", "", "", ("bucketpoint.save", "bucketpoint.rank_state"))
    rays = reference_pages.ReferencePage("reference/ray.md", "", "", ("bucketpoint.integrations.ray.save",))
    assert reference_pages.mentioned([ours, rays], "reference/ray.md") == {
        "save": "bucketpoint.integrations.ray.save",
        "rank_state": "bucketpoint.rank_state",
    }
    assert reference_pages.mentioned([ours, rays], "api.md") == {"rank_state": "bucketpoint.rank_state"}


def test_links_names_and_documents_in_docstrings_but_not_in_code() -> None:
    given = "<p><code>Stager</code>, docs/saving.md</p><pre><code>Stager</code></pre>"
    assert reference_pages.with_links(given, {"Stager": "bucketpoint.Stager"}) == (
        '<p><autoref identifier="bucketpoint.Stager"><code>Stager</code></autoref>, '
        '<a href="../../saving/">docs/saving.md</a></p><pre><code>Stager</code></pre>'
    )


COMPLETE = '''
def save(url: str, timeout: float) -> None:
    """Save.

    Args:
        url: the URL.
        timeout: seconds to wait.

    Raises:
        StoreError: the store refused.
    """
    raise StoreError("no")
'''


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("", "", None),
        ("        url: the URL.\n", "", "does not name the parameter url"),
        ("seconds to wait", "how long to wait", "timeout is a duration"),
        ("    Raises:\n        StoreError: the store refused.\n", "", "raises StoreError"),
    ],
    ids=["complete", "parameter", "unit", "error"],
)
def test_finds_a_gap_of_a_docstring(old: str, new: str, fault: str | None) -> None:
    with griffe.temporary_visited_module(COMPLETE.replace(old, new)) as module:
        found = list(check_reference._faults_of(module["save"], "save", {"StoreError"}))
    assert [fault in each for each in found] == [True] if fault is not None else found == []


def test_allows_docstrings_of_their_own_for_fields_of_a_dataclass() -> None:
    code = '''
from dataclasses import dataclass

@dataclass
class Options:
    """Options."""

    part_bytes: int
    """Bytes of a part."""
    gap: int
    """Bytes between two parts."""
    wait: int
'''
    extensions = griffe.load_extensions()
    with griffe.temporary_visited_package("package", {"__init__.py": code}, extensions=extensions) as package:
        (fault,) = check_reference._faults_of(package["Options"], "Options", set())
    assert fault.endswith("does not name the parameter wait")
