"""Keys of the objects in a run's catalog, the name template of its checkpoint folders, and the groups of items.

The keys contain all facts that a restore or a prune plan needs, so that a listing suffices and no object is read.
Weights and optimizer state are separate groups, with separate objects, so that an old checkpoint can be thinned to its
weights by replacing its metadata and deleting objects.
"""

from __future__ import annotations

import functools
import json
import re
import string
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bucketpoint.errors import InvalidURLError

MODEL = "model"
OPTIM = "optim"
OTHER = "other"

_NUMBERED = re.compile(r"_[0-9]+$")


@dataclass(frozen=True)
class GroupRule:
    """Rule that assigns an item to `group` if `segments` has a segment of its name; `optim` also matches `optim_0`."""

    group: str
    segments: frozenset[str]

    def __init__(self, group: str, segments: Iterable[str]) -> None:
        object.__setattr__(self, "group", group)
        object.__setattr__(self, "segments", frozenset(segments))


DEFAULT_RULES: tuple[GroupRule, ...] = (
    GroupRule(MODEL, ("model", "models", "module", "weights", "model_state", "model_state_dict")),
    GroupRule(
        OPTIM,
        (
            "optim", "optims", "optimizer", "optimizers", "optim_state", "optimizer_state", "optimizer_states",
            "optim_state_dict", "optimizer_state_dict", "lr_scheduler", "lr_schedulers", "scheduler",
        ),
    ),
    GroupRule(OTHER, ("dataloader", "dataset", "train_state", "trainer", "rng", "rng_state", "rng_states")),
)  # fmt: skip
"""Rules for the names that PyTorch's recipes, torchtitan, Lightning and Megatron use."""


def group_of(fqn: str, rules: Sequence[GroupRule] = DEFAULT_RULES, *, tensor: bool = True) -> str:
    """Return the object group of an item.

    The first segment that is in a rule decides, because optimizer keys end with a parameter's name, which may contain
    "model" or "weights". If no segment is in a rule, a tensor counts as a weight, because torchtitan and plain
    `model.state_dict()` saves have their weights at the top level; other values belong to the group "other".
    """
    groups = _groups_by_segment(tuple(rules))
    for segment in fqn.split("."):
        group = groups.get(segment) or groups.get(_NUMBERED.sub("", segment))
        if group is not None:
            return group
    return MODEL if tensor else OTHER


@functools.lru_cache(maxsize=16)
def _groups_by_segment(rules: tuple[GroupRule, ...]) -> dict[str, str]:
    return {segment: rule.group for rule in reversed(rules) for segment in rule.segments}


CATALOG = "_bucketpoint"
"""Folder below a run's root for everything except checkpoints."""

STEPS = "steps"
NOTES = "notes"
UPLOADS = "uploads"
LOCK = "pruner.json"
CLOCK = "clock"
"""Empty object, written only to read the store's clock from its modification time."""

CLAIM = "run.json"

OPEN = "open"
RUN = "run"
METRICS = "metrics"
PIN = "pin"
LEASE = "lease"
RESTORED = "restored"
TOMBSTONE = "tombstone"
BY_POLICY = "policy"
"""Last field of a tombstone that a prune by policy wrote. A policy cancels only tombstones with this field."""

MAX_STEP = 10**16 - 1
MAX_NAME_BYTES = 240
"""Limit on an object's name: below the 255 bytes that filesystems allow, with room for a temporary file's suffix."""

MAX_FOLDER_BYTES = 64
"""Limit on a folder's name: a key with this field and all others at their longest still fits `MAX_NAME_BYTES`."""

UNKNOWN = "00000000"
"""Mark of an object without an ETag, see `mark_of`."""

_SEPARATOR = "__"
_PLAIN = frozenset(string.ascii_letters + string.digits + ".-")
_ESCAPE = re.compile(r"_([0-9A-F]{2})")
_STEP = re.compile(r"[0-9]{16}", re.ASCII)
_MILLISECONDS = re.compile(r"[0-9]{13}", re.ASCII)
_OPEN = re.compile(OPEN)
_TOKEN = re.compile(r"[0-9a-f]{12}", re.ASCII)
_RANK = re.compile(r"[0-9]{1,9}", re.ASCII)
_MARK = re.compile(r"[0-9a-f]{8}", re.ASCII)
_GROUP = re.compile(r"(model|optim|other)\.([0-9]{1,19})", re.ASCII)
_KIND = re.compile(r"[a-z]{1,16}", re.ASCII)


@dataclass(frozen=True)
class StepTemplate:
    """Name template of a run's checkpoint folders: text with one `{step}`, or `{step:08d}` for padded names.

    A folder belongs to the run if its whole name fits the template, with the step padded or not.

    Raises:
        InvalidURLError: the template has no `{step}`, several, or other fields.
    """

    text: str = "step-{step}"

    def __post_init__(self) -> None:
        self._parts()

    def folder(self, step: int) -> str:
        if not 0 <= step <= MAX_STEP:
            raise InvalidURLError(f"Step {step} is not between 0 and {MAX_STEP}")
        return self.text.format(step=step)

    def step_of(self, folder: str) -> int | None:
        """Return the step in a folder's name, or None if the folder is not a checkpoint of this run."""
        before, after = self._parts()
        match = re.fullmatch(f"{re.escape(before)}([0-9]{{1,16}}){re.escape(after)}", folder, re.ASCII)
        return int(match[1]) if match else None

    @property
    def namespace(self) -> str:
        """Name of the folder of this run's catalog."""
        before, after = self._parts()
        return encode([f"{before}N{after}"])

    @property
    def parent(self) -> str:
        """Path of the checkpoints' folder below the root: empty, or with a slash at its end."""
        before, _ = self._parts()
        return before[: before.rfind("/") + 1]

    def _parts(self) -> tuple[str, str]:
        try:
            pieces = list(string.Formatter().parse(self.text))
            length = len(encode([self.text]))
        except ValueError:
            # UnicodeEncodeError, for half a surrogate pair, is a ValueError too.
            pieces, length = [], 0
        fields = [(name, spec, conversion) for _, name, spec, conversion in pieces if name is not None]
        fits = len(fields) == 1 and fields[0][0] == "step" and not fields[0][2]
        padded = fits and re.fullmatch(r"(0([1-9]|1[0-6]))?d?", fields[0][1] or "")
        before = pieces[0][0] if pieces else ""
        after = pieces[1][0] if len(pieces) > 1 else ""
        inside = not before.startswith(("/", CATALOG)) and "/" not in after and ".." not in before.split("/")
        if not padded or not inside or length > MAX_FOLDER_BYTES:
            raise InvalidURLError(
                f"{self.text!r} does not name the folders of checkpoints", remedy='Use something like "step-{step}"'
            )
        return before, after


@dataclass(frozen=True)
class CommitKey:
    """Key of the record of a commit. `created` is in seconds, cut to milliseconds; `groups` maps groups to bytes."""

    step: int
    created: float
    token: str
    kind: str
    mark: str
    folder: str
    groups: Mapping[str, int] = field(default_factory=dict)

    def name(self) -> str:
        # User-defined groups count as "other" here; only the record itself lists them separately.
        sums = {MODEL: 0, OPTIM: 0, OTHER: 0}
        for group, size in self.groups.items():
            sums[group if group in sums else OTHER] += size
        sizes = [f"{group}.{size}" for group, size in sums.items() if size]
        head = [_step(self.step), milliseconds(self.created), self.token, self.kind, self.mark]
        return encode([*head, *sizes, self.folder])

    @classmethod
    def parse(cls, name: str) -> CommitKey | None:
        """Parse a record's key; None for any other name, as unknown objects in the catalog are ignored."""
        parts = _fields(name, _STEP, _MILLISECONDS, _TOKEN, _KIND, _MARK)
        if parts is None:
            return None
        groups = {}
        for part in parts[5:-1]:
            match = _GROUP.fullmatch(part)
            if match is None:
                return None
            groups[match[1]] = int(match[2])
        return cls(int(parts[0]), int(parts[1]) / 1000, parts[2], parts[3], parts[4], parts[-1], groups)


@dataclass(frozen=True)
class AttemptKey:
    """Key of an attempt to save that has begun but has no record yet."""

    step: int
    token: str
    folder: str

    def name(self) -> str:
        return encode([_step(self.step), OPEN, self.token, self.folder])

    @classmethod
    def parse(cls, name: str) -> AttemptKey | None:
        parts = _fields(name, _STEP, _OPEN, _TOKEN)
        return cls(int(parts[0]), *parts[2:]) if parts is not None and len(parts) == 4 else None


@dataclass(frozen=True)
class UploadKey:
    """Key of a note: one rank of an attempt may have open multipart uploads."""

    step: int
    token: str
    rank: int
    folder: str

    def name(self) -> str:
        return encode([_step(self.step), self.token, str(self.rank), self.folder])

    @classmethod
    def parse(cls, name: str) -> UploadKey | None:
        parts = _fields(name, _STEP, _TOKEN, _RANK)
        if parts is None or len(parts) != 4:
            return None
        return cls(int(parts[0]), parts[1], int(parts[2]), parts[3])


def named_token(token: str) -> tuple[str, str]:
    """Return the two fields by which a metrics note names its commit. Version 0.2 reads them as one more metric."""
    return f"@{token}", "0"


def token_named(metric: str) -> str | None:
    """Return the token in the first field of `named_token`, or None for the name of a metric."""
    return metric[1:] if metric.startswith("@") and _TOKEN.fullmatch(metric[1:]) else None


def run_of(name: str) -> str | None:
    """Return the run in the name of a `run` object, which is in the folder of steps; None for other names."""
    parts = decode(name)
    return parts[1] if parts is not None and len(parts) == 2 and parts[0] == RUN and parts[1] else None


@dataclass(frozen=True)
class NoteKey:
    """Key of a note on a step. `kind`, one of this module's constants, determines the meaning of `fields`."""

    step: int
    kind: str
    fields: tuple[str, ...]

    def name(self) -> str:
        return encode([_step(self.step), self.kind, *self.fields])

    @classmethod
    def parse(cls, name: str) -> NoteKey | None:
        parts = _fields(name, _STEP)
        return cls(int(parts[0]), parts[1], tuple(parts[2:])) if parts is not None and len(parts) > 2 else None


def encode(parts: Sequence[str]) -> str:
    """Join fields to one name of letters, digits, dots, dashes and underscores, which no store has to escape."""
    return _SEPARATOR.join("".join(c if c in _PLAIN else _escaped(c) for c in part) for part in parts)


def decode(name: str) -> list[str] | None:
    """Return the fields of a name that `encode` made, or None for any other name."""
    if len(name) > 1024:
        return None
    parts = []
    for part in name.split(_SEPARATOR):
        try:
            raw = _ESCAPE.sub(lambda match: chr(int(match[1], 16)), part).encode("latin-1")
            parts.append(raw.decode("utf-8"))
        except UnicodeError:
            return None
    return parts if encode(parts) == name else None


def _fields(name: str, *patterns: re.Pattern[str]) -> list[str] | None:
    """Return the fields of a name if its first fields match the patterns and at least one more follows."""
    parts = decode(name)
    if parts is None or len(parts) <= len(patterns):
        return None
    return parts if all(pattern.fullmatch(part) for pattern, part in zip(patterns, parts, strict=False)) else None


def content_of(data: bytes) -> dict[str, Any]:
    """Return the JSON object in a small note, or an empty dict if the data is not a JSON object."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def milliseconds(seconds: float) -> str:
    """Format a time as 13 digits of milliseconds, so that names sort by time until the year 2286."""
    return f"{min(max(int(seconds * 1000), 0), 10**13 - 1):013d}"


def seconds(text: str) -> float | None:
    return int(text) / 1000 if _MILLISECONDS.fullmatch(text) else None


def mark_of(etag: str | None) -> str:
    """Return a short checksum of an ETag, which shows in a listing whether an object was replaced."""
    return UNKNOWN if etag is None else f"{zlib.crc32(etag.encode()):08x}"


def _step(step: int) -> str:
    if not 0 <= step <= MAX_STEP:
        raise InvalidURLError(f"Step {step} is not between 0 and {MAX_STEP}")
    return f"{step:016d}"


def _escaped(character: str) -> str:
    return "".join(f"_{byte:02X}" for byte in character.encode("utf-8"))
