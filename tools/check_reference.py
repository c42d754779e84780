"""Checks the API reference: each public name has an entry in the built site, and says its parameters, units and errors.

Run by `make site`, in whose environment Griffe is: the package is read and not imported.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import griffe

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "bucketpoint"

sys.path.insert(0, str(ROOT / "tools" / "site"))

import griffe_docstrings  # noqa: E402
import reference_pages  # noqa: E402

_DURATION = re.compile(r"(^|_)(after|age|deadline|delay|duration|for|grace|interval|latency|period|timeout|ttl)s?_?$")
_SIZE = re.compile(r"(^|_)(bandwidth|gap|length|memory|nbytes|rate|size)s?$")
_DURATION_SUFFIX = re.compile(r"_(s|ms|seconds|minutes|hours|days)$")
_SIZE_SUFFIX = re.compile(r"(^|_)n?bytes(_per_s)?$")
_DURATION_WORDS = re.compile(
    r"\b(seconds?|minutes?|hours?|days?|[0-9]+ ?(s|min|h|d))\b|\b(steps?|saves?)\b", re.IGNORECASE
)
_SIZE_WORDS = re.compile(r"\b(bytes?|[KMGT]i?B|items?|elements?)\b", re.IGNORECASE)
_NUMBER = re.compile(r"\b(int|float)\b")

_AS_FOR = re.compile(r"\b[Aa]ll other (?:arguments|parameters|fields) are (?:as for|those of) `(\w+)`")


def faults(site: Path) -> Iterator[str]:
    """Name each gap of the reference."""
    package = _package()
    errors = {name for name, member in package["errors"].members.items() if not member.is_alias and member.is_class}
    entries = {name for page in (site / "reference").rglob("index.html") for name in _ids(page)}
    for page in reference_pages.pages(PACKAGE):
        for name in page.names:
            if name not in entries:
                yield f"{page.path}: {name} has no entry"
            thing = _resolved(package, name)
            yield from _faults_of(thing, name, errors)
            # What a method of a class of another library takes is that library's to say.
            if thing.is_class and not _derives_from_elsewhere(thing):
                for method in thing.members.values():
                    if not method.is_alias and method.is_function and not method.name.startswith("_"):
                        yield from _faults_of(method, f"{name}.{method.name}", errors)


def _derives_from_elsewhere(thing: griffe.Object) -> bool:
    """True if a base class, of this class or of one of its bases, is not bucketpoint's: DCP's, or a framework's."""
    for base in thing.bases:
        path = base if isinstance(base, str) else base.canonical_path
        if path.partition(".")[0] not in ("bucketpoint", "builtins", "typing", "Generic", "Protocol", "Exception"):
            return True
        if path.startswith("bucketpoint.") and _derives_from_elsewhere(_resolved(_package(), path)):
            return True
    return False


@cache
def _package() -> griffe.Module:
    extensions = griffe.load_extensions(griffe_docstrings.Docstrings)
    return griffe.load("bucketpoint", search_paths=[str(PACKAGE.parent)], extensions=extensions)


def _ids(page: Path) -> list[str]:
    return re.findall(r'\bid="(bucketpoint\.[\w.]+)"', page.read_text(encoding="utf-8"))


def _resolved(package: griffe.Module, name: str) -> griffe.Object:
    found = package[name.removeprefix("bucketpoint.")]
    return found.final_target if found.is_alias else found


def _faults_of(thing: griffe.Object, name: str, errors: set[str]) -> Iterator[str]:
    place = f"{os.path.relpath(thing.filepath, ROOT)}:{thing.lineno}: {name}"
    if thing.is_module:
        yield f"{place}: the reference has the file of this name, and not what it defines"
        return
    if thing.docstring is None:
        if not _is_described_by_a_base(thing):
            yield f"{place} has no docstring"
        return
    described = _described(thing)
    for parameter, annotation in _parameters(thing):
        text = described.get(parameter)
        # A method's sentence may name its parameters, as in "Pin the checkpoint of a step."
        method = thing.parent is not None and thing.parent.is_class
        texts = "\n".join(docstring.value for docstring in _docstrings(thing))
        named = re.search(rf"\b{parameter}\b" if method else f"`{parameter}", texts)
        if text is None and not named:
            yield f"{place}: the docstring does not name the parameter {parameter}"
        elif unit := _missing_unit(parameter, annotation, text or thing.docstring.value):
            yield f"{place}: {parameter} is a {unit}, and neither its name nor its text says in what unit"
    raised = _raised(thing) & errors
    if raised and not _says_errors(thing):
        yield f"{place}: raises {', '.join(sorted(raised))}, and the docstring has no `Raises:`"


def _is_described_by_a_base(thing: griffe.Object) -> bool:
    if thing.parent is None or not thing.parent.is_class:
        return False
    bases = (base.members.get(thing.name) for base in thing.parent.mro())
    return any(base is not None and base.docstring is not None for base in bases)


def _parameters(thing: griffe.Object) -> Iterator[tuple[str, str]]:
    """Yield what a caller may pass, with its annotation, except what the constructor of a base takes."""
    if thing.is_attribute or (thing.is_class and "__init__" not in thing.members):
        return
    for parameter in thing.parameters:
        variadic = parameter.kind in (griffe.ParameterKind.var_positional, griffe.ParameterKind.var_keyword)
        if parameter.name not in ("self", "cls") and not parameter.name.startswith("_") and not variadic:
            yield parameter.name, str(parameter.annotation or "")


def _described(thing: griffe.Object) -> dict[str, str]:
    """Return the text of each parameter and attribute that a docstring describes, with those that it refers to."""
    texts: dict[str, str] = {}
    for docstring in _docstrings(thing):
        for section in docstring.parse("google", warnings=False):
            if section.kind in (griffe.DocstringSectionKind.parameters, griffe.DocstringSectionKind.attributes):
                texts |= {item.name: item.description for item in section.value}
        for other in _AS_FOR.findall(docstring.value):
            texts = _described(_resolved(_package(), f"bucketpoint.{other}")) | texts
    if thing.is_class:
        texts |= {
            name: member.docstring.value
            for name, member in thing.members.items()
            if not member.is_alias and member.is_attribute and member.docstring is not None
        }
    return texts


def _docstrings(thing: griffe.Object) -> Iterable[griffe.Docstring]:
    constructor = thing.members.get("__init__") if thing.is_class else None
    own = (thing.docstring, constructor.docstring if constructor is not None else None)
    return [docstring for docstring in own if docstring is not None]


def _says_errors(thing: griffe.Object) -> bool:
    sections = (section for docstring in _docstrings(thing) for section in docstring.parse("google", warnings=False))
    return any(section.kind is griffe.DocstringSectionKind.raises for section in sections)


def _missing_unit(name: str, annotation: str, text: str) -> str | None:
    if annotation and not _NUMBER.search(annotation):
        return None
    if _DURATION.search(name) and not _DURATION_SUFFIX.search(name) and not _DURATION_WORDS.search(text):
        return "duration"
    if _SIZE.search(name) and not _SIZE_SUFFIX.search(name) and not _SIZE_WORDS.search(text):
        return "size"
    return None


def _raised(thing: griffe.Object) -> set[str]:
    """Return the names of the errors that a function raises itself, or the constructor of a class does."""
    bodies = [thing.members.get(name) for name in ("__init__", "__post_init__")] if thing.is_class else [thing]
    found: set[str] = set()
    for body in bodies:
        if body is None or not body.is_function or not body.source:
            continue
        for node in ast.walk(ast.parse(textwrap.dedent(body.source))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                found.add(ast.unparse(node.exc.func).rpartition(".")[2])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("site", type=Path, help="folder of the built site")
    found = list(faults(parser.parse_args().site))
    for fault in found:
        print(fault)
    count = sum(len(page.names) for page in reference_pages.pages(PACKAGE))
    print(f"{count} public names, {len(found)} faults")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
