"""The pages of the API reference: which public name is on which page. mkdocstrings fills them from the docstrings."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class ReferencePage:
    """One page of the reference.

    Attributes:
        path: its path in the site.
        title: its heading.
        intro: text below the heading.
        names: the public names on it, with the module that they are imported from.
    """

    path: str
    title: str
    intro: str
    names: tuple[str, ...]

    def markdown(self) -> str:
        """Return its Markdown."""
        entries = "\n\n".join(f"::: {name}" for name in self.names)
        return f"# {self.title}\n\n{self.intro}\n\n{entries}\n"


# Links, code blocks and headings, which hold no further links.
_LINKED = re.compile(r"(<(?:a|autoref|pre|h\d)\b.*?</(?:a|autoref|pre|h\d)>)", re.DOTALL)
_MENTION = re.compile(r"<code>(?P<name>\w+)</code>|(?:<code>)?\bdocs/(?P<document>[\w-]+)\.md(?:</code>)?")

_READERS_AND_WRITERS = ("Writer", "Reader")
_PLANNERS = ("LoadPlanner", "SavePlanner", "rank_state", "saved_ranks")
# The other names of bucketpoint, by the room that each comes from; whatever is new in bucketpoint.dcp joins the saves.
_ROOMS = {
    "bucketpoint.catalog": "runs",
    "bucketpoint.errors": "errors",
    "bucketpoint.manager": "runs",
    "bucketpoint.retention": "runs",
    "bucketpoint.staging": "staging",
    "bucketpoint.transfer": "writers",
}
_ELSEWHERE = {
    "runs": ("bucketpoint.catalog.policy_file.read_policy",),
}
_TITLES = {
    "saving": (
        "save, load, async_save",
        "Functions that save and load, and what they return. How to: [saving](../saving.md), "
        "[saving in the background](../staging.md), [loading](../loading.md).",
    ),
    "writers": (
        "Writers and readers",
        "The classes that DCP calls, and their options. Each option in one line: [Python API](../api.md).",
    ),
    "planners": (
        "Planners",
        "How to: [many ranks](../saving.md#many-ranks-saveplanner), "
        "[state of each rank's own](../saving.md#per-rank-state).",
    ),
    "staging": ("Staging", "How a state is copied before training goes on: [saving in the background](../staging.md)."),
    "runs": ("Runs", "The checkpoints of a run: [the manager](../manager.md), [the catalog](../catalog.md)."),
    "retention": (
        "bucketpoint.retention",
        "Policies as Python objects. What each setting means: [retention policies](../retention.md).",
    ),
    "errors": (
        "Errors",
        "`bucketpoint.errors` has all of them, `bucketpoint` those that programs catch. The tree: "
        "[errors](../api.md#errors).",
    ),
    "convert": ("bucketpoint.convert", "How to: [converting checkpoints](../convert.md)."),
}
INTEGRATIONS = ("accelerate", "lightning", "megatron", "ray", "torch_checkpointing", "torchtitan", "transformers")
_GUIDES = {"torch_checkpointing": "frameworks.md#train-with-torch_checkpointing"}
"""Where the guide of an integration is not a page of its name."""


def pages(package: Path) -> list[ReferencePage]:
    """Return all pages, with every public name once."""
    names: dict[str, list[str]] = {page: [] for page in _TITLES}
    # Functions first: they are what a reader comes for, and the classes are what they take and return.
    for name, module in sorted(_top_level(package).items(), key=lambda each: not each[0].islower()):
        names[_page_of(name, module)].append(_identifier(package, "bucketpoint", name))
    for page in ("retention", "convert"):
        module = f"bucketpoint.{page}"
        names[page] += [_identifier(package, module, name) for name in public_names(_file(package, module))]
    classes = [
        node.name
        for node in ast.parse(_file(package, "bucketpoint.errors").read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    names["errors"] += [
        f"bucketpoint.errors.{name}" for name in classes if f"bucketpoint.{name}" not in names["errors"]
    ]
    # A policy is what both a run and the room of policies have; its entry is with the other settings.
    names["runs"].remove("bucketpoint.RetentionPolicy")
    names["retention"].remove("bucketpoint.retention.RetentionPolicy")
    names["retention"].insert(0, "bucketpoint.RetentionPolicy")
    for page, more in _ELSEWHERE.items():
        names[page] += more
    found = [
        ReferencePage(f"reference/{page}.md", title, intro, tuple(names[page]))
        for page, (title, intro) in _TITLES.items()
    ]
    return found + list(_integrations(package))


def _integrations(package: Path) -> Iterator[ReferencePage]:
    for name in INTEGRATIONS:
        module = f"bucketpoint.integrations.{name}"
        guide = _GUIDES.get(name, f"{name}.md")
        names = tuple(_identifier(package, module, each) for each in public_names(_file(package, module)))
        yield ReferencePage(f"reference/{name}.md", module, f"How to: [the guide](../{guide}).", names)


def _page_of(name: str, module: str) -> str:
    if name.endswith(_READERS_AND_WRITERS):
        return "writers"
    return "planners" if name in _PLANNERS else _ROOMS.get(".".join(module.split(".")[:2]), "saving")


def _identifier(package: Path, module: str, name: str) -> str:
    """Return the path under which Griffe finds a public name: as it is imported, if no file has the same name.

    `bucketpoint.dcp.async_save` is a function and a file. Griffe may take the one for the other, so such a function is
    named by the place where it is defined.
    """
    here, clashes = module, False
    while True:
        clashes |= _file(package, f"{here}.{name}").exists()
        source = _sources(_file(package, here)).get(name)
        if source is None:
            return f"{here}.{name}" if clashes else f"{module}.{name}"
        here = source


def _file(package: Path, module: str) -> Path:
    place = package.joinpath(*module.split(".")[1:])
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


@cache
def _sources(file: Path) -> dict[str, str]:
    """Return the names that a module imports from others of the package, each with the module it comes from."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {
        alias.asname or alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("bucketpoint")
        for alias in node.names
    }


def _top_level(package: Path) -> dict[str, str]:
    """Return the names of `bucketpoint.__all__` that are imported, each with the module it comes from."""
    file = package / "__init__.py"
    return {name: _sources(file)[name] for name in public_names(file)}


def mentioned(pages: Iterable[ReferencePage], path: str) -> dict[str, str]:
    """Return the identifiers of the names that may be linked on a page, by the last part of the name.

    A plain word such as `save` or `restore` may be a method's: it is linked only on the page that has its entry.
    """
    names: dict[str, str] = {}
    for page in pages:
        for name in page.names:
            last = name.rpartition(".")[2]
            if page.path == path:
                names[last] = name
            elif "_" in last or not last.islower():
                names.setdefault(last, name)
    return names


def with_links(html: str, names: Mapping[str, str]) -> str:
    """Link the public names in code, and the documents that are named by their file, in the text of docstrings.

    Args:
        html: content of a page of the reference.
        names: each public name with the identifier of its entry.
    """

    def link(found: re.Match[str]) -> str:
        if found["document"]:
            return f'<a href="../../{found["document"]}/">docs/{found["document"]}.md</a>'
        name = found["name"]
        # mkdocs-autorefs puts the link in, once it has seen all pages.
        return f'<autoref identifier="{names[name]}"><code>{name}</code></autoref>' if name in names else found[0]

    pieces = _LINKED.split(html)
    pieces[::2] = [_MENTION.sub(link, piece) for piece in pieces[::2]]
    return "".join(pieces)


def public_names(file: Path) -> list[str]:
    """Return a module's `__all__`; without one, the functions and classes that it defines with a public name."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = [str(ast.literal_eval(each)) for each in node.value.elts]  # type: ignore[attr-defined]
            return [name for name in names if not name.startswith("__")]
    defined = (node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef))
    return [node.name for node in defined if not node.name.startswith("_")]
