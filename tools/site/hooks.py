"""MkDocs' hooks for the site: navigation, first page, pages from outside docs/, and pages of the API reference."""

from __future__ import annotations

import os
import re
import runpy
from pathlib import Path
from typing import Any

import github_pages
import landing
import navigation
import reference_pages
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
INDEX = "README.md"

OUTSIDE = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "terraform/README.md": "terraform.md",
}
"""Documents that lie outside docs/, and their pages in the site."""

SOURCES = {page: source for source, page in OUTSIDE.items()}

REF = os.environ.get("BUCKETPOINT_SITE_REF", "main")
"""The branch or tag that links into the repository lead to."""

_NOWHERE = "repository:"
"""Beginning of links to files of the repository while it has no address: they become text."""


# Before mkdocstrings, which takes its options from the configuration once.
@event_priority(100)  # type: ignore[untyped-decorator]
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the navigation, GitHub's anchors, and the selector of versions where several are published."""
    config.mdx_configs["toc"]["slugify"] = github_pages.slug
    config.edit_uri = f"edit/{REF}/docs/" if config.repo_url else None
    python: dict[str, Any] = config.plugins["mkdocstrings"].config.handlers["python"]["options"]
    names = [name.rpartition(".")[2] for page in _reference() for name in page.names]
    source_url = f"{_repository(config).format('blob')}/src/" if config.repo_url else ""
    python["extra"] = {"source_url": source_url, "public": names}
    # Mike names the version that it builds. The page of a version asks for the list of all, which is nowhere else.
    if os.environ.get("MIKE_DOCS_VERSION"):
        config.extra["version"] = {"provider": "mike"}
    config.extra["package_version"] = runpy.run_path(str(ROOT / "src/bucketpoint/version.py"))["__version__"]
    config.nav = [{"Home": INDEX}, *_sections()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that have no file in docs/."""
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for entry in _reference():
        files.append(File.generated(config, entry.path, content=entry.markdown()))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make what GitHub shows ready for MkDocs."""
    here = page.file.src_uri
    if here.startswith("reference/"):
        return markdown
    pages = {f"docs/{file.src_uri}": file.src_uri for file in files if not file.generated_by} | OUTSIDE
    source = SOURCES.get(here, f"docs/{here}")
    if here == INDEX:
        source = "README.md"
        # The page itself has the index of the documents.
        page.meta["hide"] = ["navigation", "toc"]
        in_docs = {path: path for path in pages}
        index = github_pages.with_links(markdown, f"docs/{INDEX}", "index.md", in_docs, ROOT, _repository(config))
        markdown = landing.page((ROOT / source).read_text(encoding="utf-8"), index)
    markdown = github_pages.with_links(markdown, source, here, pages, ROOT, _repository(config))
    return github_pages.deeper_lists(re.sub(rf"\[([^\[\]]*)\]\({_NOWHERE}[^)]*\)", r"\1", markdown))


def on_page_content(html: str, *, page: Page, **_: Any) -> str:
    """Let the names and documents that docstrings mention be links, and the names of the page on the Python API."""
    if not page.file.src_uri.startswith("reference/") and page.file.src_uri != "api.md":
        return html
    return reference_pages.with_links(html, reference_pages.mentioned(_reference(), page.file.src_uri))


def on_pre_page(page: Page, *, config: MkDocsConfig, files: Files) -> Page:
    """Let the button of a page lead to its own file in the repository."""
    if config.repo_url and (source := SOURCES.get(page.file.src_uri)):
        page.edit_url = f"{_repository(config).format('edit')}/{source}"
    return page


def _repository(config: MkDocsConfig) -> str:
    return f"{config.repo_url or _NOWHERE}/{{}}/{REF}"


def _sections() -> list[dict[str, Any]]:
    index = (DOCS / INDEX).read_text(encoding="utf-8")
    found = []
    for title, entries in navigation.sections(index).items():
        pages = [_located(entry) for entry in entries]
        if title == "Reference":
            pages += _reference_sections()
        found.append({title: pages})
    return found


def _located(entry: Any) -> Any:
    if isinstance(entry, dict):
        return {title: [_located(page) for page in pages] for title, pages in entry.items()}
    return OUTSIDE.get(entry.removeprefix("../"), entry)


def _reference() -> list[reference_pages.ReferencePage]:
    return reference_pages.pages(ROOT / "src" / "bucketpoint")


def _reference_sections() -> list[dict[str, Any]]:
    pages = _reference()
    integrations = [{page.title.rpartition(".")[2]: page.path} for page in pages if ".integrations." in page.title]
    return [
        {"Names and docstrings": [page.path for page in pages if ".integrations." not in page.title]},
        {"Names of integrations": integrations},
    ]
