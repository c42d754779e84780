"""HTML from text that anybody may have written: all of it is escaped, except what these functions made."""

from __future__ import annotations

from collections.abc import Iterable

from bucketpoint.cli.text import escaped

_EMPTY = frozenset({"meta", "link", "path", "use"})
"""Elements that are written without an end tag or, in SVG, with a slash."""


class Markup(str):
    """Text that is HTML already, and is not escaped again."""

    __slots__ = ()


def element(name: str, /, *content: str, **attributes: object) -> Markup:
    """Return an element. Content that is no `Markup` is escaped, and so is each attribute.

    Args:
        attributes: `class_` stands for `class`, and an underscore within a name for a dash. None leaves one out.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escaped(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _EMPTY and not content:
        return Markup(f"<{name}{given}/>")
    return Markup(f"<{name}{given}>{joined(content)}</{name}>")


def joined(parts: Iterable[str]) -> Markup:
    """Join parts without anything between them; those that are no `Markup` are escaped."""
    return Markup("".join(part if isinstance(part, Markup) else escaped(part) for part in parts))
