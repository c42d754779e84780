"""Reading a policy from YAML text, and writing it. Every fault is found, with its line and column.

The text is read as YAML's node graph, which knows the place of everything, and scalars are resolved as in YAML 1.2:
`on` is a word. Aliases, tags and merge keys are refused: a policy is short, and its values should be written out.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING
from typing import Any, TypeVar

import yaml

from bucketpoint.errors import PolicyError, PolicyFault
from bucketpoint.retention.policy import POLICY_VERSION, RetentionPolicy
from bucketpoint.retention.setting_types import (
    Checked,
    Either,
    Fields,
    Setting,
    Several,
    Shape,
    settings_of,
    shown,
    wrong,
)

MAX_CHARACTERS = 1 << 20
"""Most characters of a policy's text. Far above any policy."""

MAX_DEPTH = 20
"""Deepest nesting that is read. A policy has 6 levels. PyYAML's time grows with the square of the depth."""

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
_Path = tuple[str | int, ...]
_Kind = TypeVar("_Kind", bound=Checked)


def from_yaml(text: str, *, environ: Mapping[str, str], file: str | None = None) -> RetentionPolicy:
    """Read the policy in `text`.

    Args:
        text: YAML; `docs/retention.md` describes it, `policy.schema.json` beside this module does so for editors.
        environ: values of `${VAR}` and `${VAR:-default}` in `root`, such as `os.environ`.
        file: name of the file in errors.

    Raises:
        PolicyError: the policy is wrong, with every fault and its line and column.
    """
    reader = _Reader(environ)
    policy = None
    try:
        if len(text) > MAX_CHARACTERS:
            raise wrong(f"{len(text)} characters are too many for a policy", f"Pass at most {MAX_CHARACTERS}")
        policy = reader.policy(_composed(text))
    except PolicyError as error:
        reader.faults += error.faults
    if policy is None or reader.faults:
        raise PolicyError.of(*sorted(reader.faults, key=lambda fault: (fault.line or 0, fault.column or 0)), file=file)
    return policy


def to_yaml(policy: RetentionPolicy) -> str:
    """Write a policy as `from_yaml` reads it, without the settings that have their default."""
    plain = {"version": POLICY_VERSION, **Fields(RetentionPolicy).plain(policy)}
    if policy.root is not None:
        plain["root"] = policy.root.replace("$", "$$")
    # A setting that is not in the order raises, where leaving it out would write another policy.
    ordered = dict(sorted(plain.items(), key=lambda item: _ORDER.index(item[0])))
    return yaml.dump(ordered, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)  # type: ignore[no-any-return]


class _Reader:
    """Reader that walks the nodes along the shapes, and notes every fault with its place."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.faults: list[PolicyFault] = []
        self.places: dict[_Path, _Place] = {}

    def policy(self, root: yaml.Node | None) -> RetentionPolicy | None:
        if root is None:
            raise PolicyError.of(
                PolicyFault("The policy is empty", "Write at least `version: 1` and `keep:`", (), 1, 1)
            )
        self.places[()] = _place(root)
        return self.record(RetentionPolicy, root, ())

    def record(self, kind: type[_Kind], node: yaml.Node, path: _Path) -> _Kind | None:
        if not isinstance(node, yaml.MappingNode):
            self._fault(f"{_named(node)} is not a mapping", "Write keys with values", path)
            return None
        known = {setting.key: setting for setting in settings_of(kind)}
        if not path:
            known = {"version": Setting("version", "version", _Version(), "", MISSING), **known}
        before = len(self.faults)
        children, meant = self._children(node, known, path)
        values = {known[key].name: self.value(known[key].shape, child, (*path, key)) for key, child in children.items()}
        for setting in known.values():
            if setting.required and setting.key not in children and setting.key not in meant:
                self._fault(f"`{setting.key}` is missing", f"Add `{setting.key}:`", path)
        if not path:
            values.pop("version", None)
        if len(self.faults) > before:
            self._note(kind.conflicts(values), path)
            return None
        try:
            return kind(**values)
        except PolicyError as error:
            self._note(error.faults, path)
            return None

    def _children(
        self, node: yaml.MappingNode, known: Mapping[str, Setting], path: _Path
    ) -> tuple[dict[str, yaml.Node], set[str]]:
        """Return the value node of each known key, and the known keys that unknown ones were probably meant to be."""
        children: dict[str, yaml.Node] = {}
        lines: dict[str, int] = {}
        meant = set()
        for key_node, child in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else _named(key_node)
            place = _place(key_node)
            if key in lines:
                message = f"The key `{key}` is given twice, first in line {lines[key]}"
                self.faults.append(PolicyFault(message, "Remove one of the two", (*path, key), *place))
            elif key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                meant.update(near)
                remedy = f"Did you mean `{near[0]}`?" if near else f"The known keys are: {', '.join(known)}"
                self.faults.append(PolicyFault(f"The key `{key}` is not known", remedy, (*path, key), *place))
            else:
                children[key] = child
                self.places[(*path, key)] = _place(child)
            lines.setdefault(key, place[0])
        return children, meant

    def value(self, shape: Shape, node: yaml.Node, path: _Path) -> Any:
        """Return the value of a node, or None after a fault was noted."""
        self.places[path] = _place(node)
        if isinstance(node, yaml.ScalarNode) and _scalar(node) is None:
            self._fault("The value is missing", "Write a value, or leave the key out", path)
            return None
        if isinstance(shape, Fields):
            return self.record(shape.kind, node, path)
        if isinstance(shape, Either):
            return self._either(shape, node, path)
        if isinstance(shape, Several):
            return self._several(shape, node, path)
        try:
            content = _scalar(node) if isinstance(node, yaml.ScalarNode) else _Named(node)
            if path == ("root",) and isinstance(content, str):
                content = self._interpolated(content, node)
            return shape.check(content)
        except PolicyError as error:
            self._note(error.faults, path)
            return None

    def _either(self, shape: Either, node: yaml.Node, path: _Path) -> Checked | None:
        kinds = shape.keys()
        names = " or ".join(f"`{key}`" for key in kinds)
        if not isinstance(node, yaml.MappingNode):
            self._fault(f"{_named(node)} is not a mapping", f"Write a mapping with {names}", path)
            return None
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        given = (key for key in keys if key in kinds)
        meant = (near[0] for key in keys if (near := difflib.get_close_matches(key, kinds, n=1)))
        kind = next(given, None) or next(meant, None)
        if kind is None:
            self._fault(f"Neither {names.replace(' or ', ' nor ')} is given", f"Add {names}", path)
            return None
        return self.record(kinds[kind], node, path)

    def _several(self, shape: Several, node: yaml.Node, path: _Path) -> tuple[Any, ...]:
        if not isinstance(node, yaml.SequenceNode):
            self._fault(f"{_named(node)} is not a list", "Write a list, also for a single one: [...]", path)
            return ()
        if not node.value:
            self._fault("The list is empty", "Write at least one, or leave the key out", path)
        items = [self.value(shape.of, child, (*path, position)) for position, child in enumerate(node.value)]
        sound = [(position, item) for position, item in enumerate(items) if item is not None]
        for fault in shape.conflicts([item for _, item in sound]):
            number, *rest = fault.path
            self._note([PolicyFault(fault.message, fault.remedy, (sound[int(number)][0], *rest))], path)
        return tuple(items)

    def _interpolated(self, text: str, node: yaml.Node) -> str:
        """Replace the variables in the root, or note a fault at a variable that is not set."""

        def replaced(match: re.Match[str]) -> str:
            if match[0] == "$$":
                return "$"
            if match[1] is None:
                return fault(
                    match, "A `$` is not followed by a name", "Write $$ for a dollar sign, or ${VAR} for a variable"
                )
            found = self.environ.get(match[1]) or match[2]
            if found is None:
                state = "empty" if match[1] in self.environ else "not set"
                return fault(match, f"{match[1]} is {state}", f"Set it, or write ${{{match[1]}:-default}}")
            return found

        def fault(match: re.Match[str], message: str, remedy: str) -> str:
            line, column = _place(node)
            column += match.start() + (1 if getattr(node, "style", None) in ("'", '"') else 0)
            self.faults.append(PolicyFault(message, remedy, ("root",), line, column))
            return "unset"

        return _VARIABLE.sub(replaced, text)

    def _fault(self, message: str, remedy: str, path: _Path) -> None:
        self._note([PolicyFault(message, remedy)], path)

    def _note(self, faults: Iterable[PolicyFault], path: _Path) -> None:
        """Note faults as seen from `path`, each at the place of the longest path that is in the text."""
        for fault in faults:
            whole = (*path, *fault.path)
            known = next(whole[:end] for end in range(len(whole), -1, -1) if whole[:end] in self.places)
            self.faults.append(PolicyFault(fault.message, fault.remedy, whole, *self.places[known]))


class _Version(Shape):
    """Shape of the format's version: only this version is accepted."""

    def check(self, value: Any) -> int:
        if type(value) is not int or value != POLICY_VERSION:
            remedy = f"Write `version: {POLICY_VERSION}`, or update bucketpoint"
            raise wrong(f"Version {shown(value)} is not known", remedy)
        return POLICY_VERSION


class _Named:
    """Stand-in for a node that no scalar shape takes. Messages show it by the type of the node."""

    def __init__(self, node: yaml.Node) -> None:
        self.node = node

    def __repr__(self) -> str:
        return _named(self.node)


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # PyYAML quotes only texts that are numbers in YAML 1.1; `1e3` is a number in 1.2 only.
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if isinstance(_plain(text), str) else '"')


_Dumper.add_representer(str, _represent_text)


def _composed(text: str) -> yaml.Node | None:
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
        return yaml.compose(text, Loader=yaml.SafeLoader)
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


def _at(mark: Any, message: str, remedy: str) -> PolicyError:
    place = (mark.line + 1, mark.column + 1) if mark is not None else (None, None)
    return PolicyError.of(PolicyFault(message, remedy, (), *place))


def _place(node: yaml.Node) -> _Place:
    return node.start_mark.line + 1, node.start_mark.column + 1


def _named(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return shown(_scalar(node))
    return "A list" if isinstance(node, yaml.SequenceNode) else "A mapping"


def _scalar(node: yaml.ScalarNode) -> Any:
    return _plain(node.value) if node.style is None else node.value


def _plain(text: str) -> str | int | float | bool | None:
    """Resolve a scalar without quotes, by YAML 1.2's core schema without octal and hexadecimal numbers."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text) and len(text) < 400:
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text
