"""Keys of a run's catalogue: how they are made and taken apart, and which folders are a run's checkpoints. No I/O.

A key says all that a restore or a plan needs, so that a listing suffices and no object need be read.
"""

from __future__ import annotations

import json
import re
import string
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bucketpoint.errors import InvalidURLError
from bucketpoint.format.groups import MODEL, OPTIM, OTHER

CATALOGUE = "_bucketpoint"
"""The folder below a run's root that holds everything but checkpoints."""

STEPS = "steps"
NOTES = "notes"
UPLOADS = "uploads"
LOCK = "pruner.json"
CLAIM = "run.json"

OPEN = "open"
RUN = "run"
METRICS = "metrics"
PIN = "pin"
LEASE = "lease"
RESTORED = "restored"
TOMBSTONE = "tombstone"

MAX_STEP = 10**16 - 1
MAX_NAME_BYTES = 240
"""Below the 255 bytes that filesystems allow a file name, with room for the suffix of a temporary one."""

MAX_FOLDER_BYTES = 64
"""With all other fields at their longest, a folder's name of this length still fits."""

UNKNOWN = "00000000"
"""The mark of an object without an ETag."""

_SEPARATOR = "__"
_PLAIN = frozenset(string.ascii_letters + string.digits + ".-")
_ESCAPE = re.compile(r"_([0-9A-F]{2})")
_STEP = re.compile(r"[0-9]{16}", re.ASCII)
_MILLISECONDS = re.compile(r"[0-9]{13}", re.ASCII)
_TOKEN = re.compile(r"[0-9a-f]{12}", re.ASCII)
_RANK = re.compile(r"[0-9]{1,9}", re.ASCII)
_MARK = re.compile(r"[0-9a-f]{8}", re.ASCII)
_GROUP = re.compile(r"(model|optim|other)\.([0-9]{1,19})", re.ASCII)
_KIND = re.compile(r"[a-z]{1,16}", re.ASCII)


@dataclass(frozen=True)
class StepTemplate:
    """Names of a run's checkpoint folders: text with one `{step}`, or `{step:08d}` for padded names.

    A name belongs to the run if all of it fits, padded or not.

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
        """The step of a folder's name, or None if the folder is not this run's."""
        before, after = self._parts()
        match = re.fullmatch(f"{re.escape(before)}([0-9]{{1,16}}){re.escape(after)}", folder, re.ASCII)
        return int(match[1]) if match else None

    @property
    def namespace(self) -> str:
        """The folder of this run's catalogue."""
        before, after = self._parts()
        return encode([f"{before}N{after}"])

    @property
    def parent(self) -> str:
        """The folder below the root in which the checkpoints are; empty, or with a slash at its end."""
        before, _ = self._parts()
        return before[: before.rfind("/") + 1]

    def _parts(self) -> tuple[str, str]:
        try:
            pieces = list(string.Formatter().parse(self.text))
            length = len(encode([self.text]))
        except ValueError:
            # Of text with half a surrogate pair as well.
            pieces, length = [], 0
        fields = [(name, spec, conversion) for _, name, spec, conversion in pieces if name is not None]
        fits = len(fields) == 1 and fields[0][0] == "step" and not fields[0][2]
        padded = fits and re.fullmatch(r"(0([1-9]|1[0-6]))?d?", fields[0][1] or "")
        before = pieces[0][0] if pieces else ""
        after = pieces[1][0] if len(pieces) > 1 else ""
        inside = not before.startswith(("/", CATALOGUE)) and "/" not in after and ".." not in before.split("/")
        if not padded or not inside or length > MAX_FOLDER_BYTES:
            raise InvalidURLError(
                f"{self.text!r} does not name the folders of checkpoints", remedy='Use something like "step-{step}"'
            )
        return before, after


@dataclass(frozen=True)
class CommitKey:
    """What the key of a record says of a commit. `created` in seconds, rounded to milliseconds; `groups` in bytes."""

    step: int
    created: float
    token: str
    kind: str
    mark: str
    folder: str
    groups: Mapping[str, int] = field(default_factory=dict)

    def name(self) -> str:
        # Groups of a user's own are one here; the record itself tells them apart.
        sums = {MODEL: 0, OPTIM: 0, OTHER: 0}
        for group, size in self.groups.items():
            sums[group if group in sums else OTHER] += size
        sizes = [f"{group}.{size}" for group, size in sums.items() if size]
        head = [_step(self.step), milliseconds(self.created), self.token, self.kind, self.mark]
        return encode([*head, *sizes, self.folder])

    @classmethod
    def parse(cls, name: str) -> CommitKey | None:
        """None for any other name: an unknown object in the catalogue is left alone."""
        parts = decode(name)
        if parts is None or len(parts) < 6 or not _STEP.fullmatch(parts[0]) or not _MILLISECONDS.fullmatch(parts[1]):
            return None
        if not _TOKEN.fullmatch(parts[2]) or not _KIND.fullmatch(parts[3]) or not _MARK.fullmatch(parts[4]):
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
    """An attempt to save that has begun and has no record yet."""

    step: int
    token: str
    folder: str

    def name(self) -> str:
        return encode([_step(self.step), OPEN, self.token, self.folder])

    @classmethod
    def parse(cls, name: str) -> AttemptKey | None:
        parts = decode(name)
        if parts is None or len(parts) != 4 or not _STEP.fullmatch(parts[0]) or parts[1] != OPEN:
            return None
        return cls(int(parts[0]), parts[2], parts[3]) if _TOKEN.fullmatch(parts[2]) else None


@dataclass(frozen=True)
class UploadKey:
    """Multipart uploads that one rank of an attempt may have open."""

    step: int
    token: str
    rank: int
    folder: str

    def name(self) -> str:
        return encode([_step(self.step), self.token, str(self.rank), self.folder])

    @classmethod
    def parse(cls, name: str) -> UploadKey | None:
        parts = decode(name)
        if parts is None or len(parts) != 4 or not _STEP.fullmatch(parts[0]) or not _TOKEN.fullmatch(parts[1]):
            return None
        return cls(int(parts[0]), parts[1], int(parts[2]), parts[3]) if _RANK.fullmatch(parts[2]) else None


def run_of(name: str) -> str | None:
    """The run that a name among the steps says they are of, or None for any other name."""
    parts = decode(name)
    return parts[1] if parts is not None and len(parts) == 2 and parts[0] == RUN and parts[1] else None


@dataclass(frozen=True)
class NoteKey:
    """Something said about a step: `kind` is one of this module's, and decides what the fields are."""

    step: int
    kind: str
    fields: tuple[str, ...]

    def name(self) -> str:
        return encode([_step(self.step), self.kind, *self.fields])

    @classmethod
    def parse(cls, name: str) -> NoteKey | None:
        parts = decode(name)
        if parts is None or len(parts) < 3 or not _STEP.fullmatch(parts[0]):
            return None
        return cls(int(parts[0]), parts[1], tuple(parts[2:]))


def encode(parts: Sequence[str]) -> str:
    """Fields as one name of letters, digits, dots, dashes and underscores, which every store takes as it is."""
    return _SEPARATOR.join("".join(c if c in _PLAIN else _escaped(c) for c in part) for part in parts)


def decode(name: str) -> list[str] | None:
    """The fields of a name that `encode` made, or None."""
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


def content_of(data: bytes) -> dict[str, Any]:
    """The JSON object that a small note holds; empty where it holds none, whatever else it is."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def milliseconds(seconds: float) -> str:
    """13 digits, so that names sort by time until the year 2286."""
    return f"{min(max(int(seconds * 1000), 0), 10**13 - 1):013d}"


def seconds(text: str) -> float | None:
    return int(text) / 1000 if _MILLISECONDS.fullmatch(text) else None


def mark_of(etag: str | None) -> str:
    """A short sum of an ETag, by which a listing tells whether the object is still the one that was recorded."""
    return UNKNOWN if etag is None else f"{zlib.crc32(etag.encode()):08x}"


def _step(step: int) -> str:
    if not 0 <= step <= MAX_STEP:
        raise InvalidURLError(f"Step {step} is not between 0 and {MAX_STEP}")
    return f"{step:016d}"


def _escaped(character: str) -> str:
    return "".join(f"_{byte:02X}" for byte in character.encode("utf-8"))
