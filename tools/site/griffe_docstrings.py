"""An extension of Griffe for what the package's docstrings, and its policies' annotations, say in a shorter form."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

import griffe

_SECTION = re.compile(r"^(Args|Attributes):\n((?:[ \t]+.*\n?|\n)*)", re.MULTILINE)
_JOINT = re.compile(r"^(?P<indent> +)(?P<names>\w+(?:, \w+)+): (?P<text>.*\n?(?:(?P=indent) +.*\n?)*)", re.MULTILINE)


def apart(docstring: str) -> str:
    """Give each parameter that a docstring describes together with others an entry of its own, with the same text.

    Griffe's parser takes `a, b: text` for one parameter of that name, which no signature has.
    """
    return _SECTION.sub(lambda section: _JOINT.sub(_entries, section[0]), docstring)


def _entries(joint: re.Match[str]) -> str:
    text = joint["text"].rstrip("\n")
    return "".join(f"{joint['indent']}{name}: {text}\n" for name in joint["names"].split(", "))


def annotated_text(annotation: str) -> str | None:
    """Return the text with which an `Annotated[...]` ends, as the settings of a policy do; None without one."""
    tree = ast.parse(annotation, mode="eval").body
    if isinstance(tree, ast.Subscript) and ast.unparse(tree.value) == "Annotated" and isinstance(tree.slice, ast.Tuple):
        last = tree.slice.elts[-1]
        if isinstance(last, ast.Constant) and isinstance(last.value, str):
            return last.value
    return None


def _settings(cls: griffe.Class) -> Iterator[tuple[str, str]]:
    for name, member in cls.members.items():
        if member.is_alias or not member.is_attribute or member.annotation is None:
            continue
        annotation = str(member.annotation)
        alias = cls.module.members.get(annotation)
        # `Thin: TypeAlias = Annotated[...]` stands for its value.
        if alias is not None and not alias.is_alias and alias.is_attribute:
            annotation = str(alias.value)
        if text := annotated_text(annotation):
            yield name, text


class Docstrings(griffe.Extension):  # type: ignore[misc]
    """Changes docstrings before they are parsed."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Take the names of a docstring's entries apart."""
        if obj.docstring is not None:
            obj.docstring.value = apart(obj.docstring.value)

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Add the texts of a policy's settings."""
        settings = list(_settings(cls))
        if cls.docstring is not None and settings and "\nAttributes:\n" not in cls.docstring.value:
            lines = "\n".join(f"    {name}: {text}." for name, text in settings)
            cls.docstring.value = f"{cls.docstring.value}\n\nAttributes:\n{lines}\n"
