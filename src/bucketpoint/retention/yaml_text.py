"""Reader and writer of a policy as YAML. The reader reports every fault, with its line and column.

It uses YAML's node graph, where each node has line and column, and resolves scalars as in YAML 1.2, where `on` is text.
Aliases, tags and merge keys are refused: in a short text, values should be written out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING
from typing import Any

import yaml

from bucketpoint.errors import PolicyError, PolicyFault
from bucketpoint.retention.policy import POLICY_VERSION, RetentionPolicy
from bucketpoint.retention.setting_types import Fields, Path, Setting, Shape, shown, wrong

MAX_BYTES = 64 << 10
"""Limit on the bytes of a policy's text. `examples/retention.yaml` has 2 kB."""

MAX_DEPTH = 20
"""Limit on the levels of nesting, because PyYAML's time grows with their square. A policy has 6 levels."""

_ORDER = ("version", "root", "run", "layout", "save", "keep", "prune")

_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
}

_VARIABLE = re.compile(r"\$\$|\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}|\$")

_Place = tuple[int, int]


def from_yaml(text: str, *, environ: Mapping[str, str], file: str | None = None) -> RetentionPolicy:
    """Read the policy in `text`.

    Args:
        text: YAML as in `docs/retention.md` and, for editors, `policy.schema.json` beside this module.
        environ: values of `${VAR}` and `${VAR:-default}` in `root`, such as `os.environ`.
        file: name of the file, for errors.

    Raises:
        PolicyError: the policy has faults; the error lists all of them, with line and column.
    """
    reader = _Reader(environ)
    faults = reader.faults
    try:
        # The message does not give the length, because `read_policy` reads only one byte more than the limit.
        if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
            raise wrong(f"The text is longer than {MAX_BYTES} bytes, too long for a policy", "Name the policy's file")
        policy = POLICY.read(reader.data(_composed(text)), (), faults)
    except PolicyError as error:
        faults += error.faults
    if faults:
        placed = sorted(map(reader.placed, faults), key=lambda fault: (fault.line or 0, fault.column or 0))
        raise PolicyError.of(*placed, file=file)
    return policy  # type: ignore[no-any-return]


def to_yaml(policy: RetentionPolicy) -> str:
    """Return `policy` as YAML for `from_yaml`, without settings that have their default."""
    plain = {"version": POLICY_VERSION, **Fields(RetentionPolicy).plain(policy)}
    if policy.root is not None:
        plain["root"] = policy.root.replace("$", "$$")
    # `index` raises for a setting that is not in `_ORDER`, so no setting is lost.
    ordered = dict(sorted(plain.items(), key=lambda item: _ORDER.index(item[0])))
    return yaml.dump(ordered, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)  # type: ignore[no-any-return]


class _Key(str):
    """Key of a mapping with its line and column."""

    place: _Place


class _Reader:
    """Converter of YAML nodes to plain data. It records the line and column of each value in `places`."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.faults: list[PolicyFault] = []
        self.places: dict[Path, _Place] = {}

    def data(self, node: yaml.Node, path: Path = ()) -> Any:
        self.places[path] = _place(node)
        if isinstance(node, yaml.SequenceNode):
            return [self.data(child, (*path, position)) for position, child in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        content = _plain(node.value) if node.style is None else node.value
        return self._interpolated(content, node) if path == ("root",) and isinstance(content, str) else content

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[_Key, Any]:
        mapping: dict[_Key, Any] = {}
        lines: dict[str, int] = {}
        for key_node, child in node.value:
            key = _Key(key_node.value if isinstance(key_node, yaml.ScalarNode) else shown(key_node.value))
            key.place = _place(key_node)
            if key in mapping:
                message = f"The key `{key}` is given twice, first in line {lines[key]}"
                self.faults.append(PolicyFault(message, "Remove one of the two", (*path, key), *key.place))
            else:
                mapping[key], lines[key] = self.data(child, (*path, key)), key.place[0]
        return mapping

    def placed(self, fault: PolicyFault) -> PolicyFault:
        """Return a fault with the line and column of the innermost node of its path that is in the text."""
        parts = (fault.path[:end] for end in range(len(fault.path), -1, -1))
        place = next((self.places[part] for part in parts if part in self.places), (None, None))
        path = tuple(str(part) if isinstance(part, str) else part for part in fault.path)
        line, column = place if fault.line is None else (fault.line, fault.column)
        return PolicyFault(fault.message, fault.remedy, path, line, column)

    def _interpolated(self, text: str, node: yaml.ScalarNode) -> str:
        """Replace the variables in `root`. Record a fault for each variable that is not set."""

        def replaced(match: re.Match[str]) -> str:
            name, default = match[1], match[2]
            value = "$" if match[0] == "$$" else self.environ.get(name or "") or default
            if value is not None:
                return value
            message, remedy = "A `$` is not followed by a name", "Write $$ for a dollar sign, or ${VAR} for a variable"
            if name is not None:
                message = f"{name} is {'empty' if name in self.environ else 'not set'}"
                remedy = f"Set it, or write ${{{name}:-default}}"
            line, column = _place(node)
            column += match.start() + (node.style in ("'", '"'))
            self.faults.append(PolicyFault(message, remedy, ("root",), line, column))
            return "unset"

        return _VARIABLE.sub(replaced, text)


class Version(Shape):
    """Shape of the format's version, which accepts only `POLICY_VERSION`."""

    def check(self, value: Any) -> int:
        if type(value) is not int or value != POLICY_VERSION:
            remedy = f"Write `version: {POLICY_VERSION}`, or update bucketpoint"
            raise wrong(f"Version {shown(value)} is not supported", remedy)
        return POLICY_VERSION


POLICY = Fields(RetentionPolicy, (Setting("version", "version", Version(), "version of the format", MISSING),))


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # PyYAML quotes only texts that are numbers in YAML 1.1, and `1e3` is a number only in 1.2.
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if isinstance(_plain(text), str) else '"')


_Dumper.add_representer(str, _represent_text)


def _composed(text: str) -> yaml.Node:
    try:
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise _at(event.start_mark, "The policy is nested too deeply", "Remove levels of nesting")
            tag = getattr(event, "tag", None)
            anchor = getattr(event, "anchor", None)
            if anchor is not None or tag is not None:
                what = f"The anchor or alias `{anchor}`" if anchor is not None else f"The tag `{tag}`"
                raise _at(event.start_mark, f"{what} is not allowed in a policy", "Write the value itself")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        raise _at(mark, f"The text is not YAML: {problem}", "Check indentation, colons and quotes") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - (text.rfind("\n", 0, error.position) + 1) + 1
        fault = PolicyFault(
            f"The character #x{error.character:04x} is not allowed in YAML", "Remove it", (), line, column
        )
        raise PolicyError.of(fault) from None
    if root is None:
        raise PolicyError.of(PolicyFault("The policy is empty", "Write at least `version: 1` and `keep:`", (), 1, 1))
    return root


def _at(mark: Any, message: str, remedy: str) -> PolicyError:
    place = (mark.line + 1, mark.column + 1) if mark is not None else (None, None)
    return PolicyError.of(PolicyFault(message, remedy, (), *place))


def _place(node: yaml.Node) -> _Place:
    return node.start_mark.line + 1, node.start_mark.column + 1


def _plain(text: str) -> str | int | float | bool | None:
    """Resolve an unquoted scalar by YAML 1.2's core schema, without octal and hexadecimal numbers."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text) and len(text) < 400:
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text
