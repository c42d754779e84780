"""Conversion of torch_checkpointing's paths to keys and back, and the names of objects.

A path `a/b` has the key `a/b/`, followed by one of these names of objects:

- `@f.TOKEN.ATTEMPT.RANDOM`: the bytes of a file in a temporary directory. Each write makes a new key, and the newest
  object is the file.
- `@d`: the manifest of a directory that was committed to this path, which names the objects of its files.
- `@o.TOKEN.ATTEMPT.RANDOM`: the bytes of any other file. `@n`: the entry that names the object of such a file.

Version 0.2 wrote all files as `@f.`. It renamed a file by a `@l.TOKEN.ATTEMPT.RANDOM`, JSON that names the object with
the bytes, and marked deleted and moved files by `@dx.TOKEN`. Objects with other names are ignored.

A temporary directory `tmp_a` has the key `a/@tmp/`, so that one listing below `a/` finds a save and its commit.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bucketpoint.errors import InvalidURLError
from bucketpoint.forks import ProcessLock

Parts = tuple[str, ...]
"""Components of a path below the root; empty for the root itself."""

FILE, MANIFEST, OTHER_FILE, ENTRY, STAGED = "@f.", "@d", "@o.", "@n", "@tmp"
LINK, MARKER = "@l.", "@dx."
VERSION = re.compile(r"@[fl]\.([0-9a-f]{16})\.([A-Za-z0-9_-]*)\.[0-9a-f]{8}")
"""Name of a file's object in a temporary directory, or from version 0.2. Groups: token and attempt."""

_lock = ProcessLock()
_last = 0


def object_name(kind: str, attempt: str) -> str:
    """Return a new name of an object. Names sort by time, and those of one process in the order of the calls."""
    global _last
    with _lock:
        _last = max(time.time_ns(), _last + 1)
        return f"{kind}{_last:016x}.{attempt}.{secrets.token_hex(4)}"


@dataclass(frozen=True)
class Names:
    """Paths and keys of one root.

    Attributes:
        root: the root's URL. Paths may begin with this URL, even without the slash that `Path` drops.
        prefix: key prefix of the root.
        temp_dir_prefix: prefix of the names of temporary directories.
    """

    root: str
    prefix: str
    temp_dir_prefix: str

    def parts(self, path: str | os.PathLike[str]) -> Parts:
        """Return the components of a path below the root. Raises InvalidURLError for a path outside the root."""
        text = os.fspath(path)
        folded = re.sub(r"^([A-Za-z][A-Za-z0-9+.-]+):/+", r"\1:/", text)
        home = re.sub(r"^([A-Za-z][A-Za-z0-9+.-]+):/+", r"\1:/", self.root).rstrip("/")
        if home and (folded == home or folded.startswith(home + "/")):
            folded = folded[len(home) :]
        elif re.match(r"^[A-Za-z][A-Za-z0-9+.-]+:/", folded):
            raise InvalidURLError(
                f"{text} is not below the storage's root", url=self.root, remedy="Pass a path relative to the root"
            )
        parts = tuple(part for part in folded.split("/") if part not in ("", "."))
        if ".." in parts:
            raise InvalidURLError(f"{text} has a component ..", url=self.root, remedy="Pass a path without ..")
        return parts

    def temporary(self, parts: Parts) -> Parts:
        """Return the outermost temporary directory at or above a path; empty if there is none."""
        depths = (depth for depth, part in enumerate(parts, 1) if self._rest(part) != part)
        return parts[: next(depths, 0)]

    def key(self, parts: Parts, *behind: str) -> str:
        """Return the key of a path, with `behind` appended."""
        return "/".join((*([self.prefix] if self.prefix else []), *self.components(parts), *behind))

    def components(self, parts: Parts) -> list[str]:
        """Return the components of a path's key, without those of the root."""
        found = []
        for part in parts:
            rest = self._rest(part)
            found.append(f"@{rest}" if rest.startswith("@") else rest)
            if rest != part:
                found.append(STAGED)
        return found

    def _rest(self, part: str) -> str:
        """Return a temporary directory's name without its prefix; any other component unchanged."""
        return part.removeprefix(self.temp_dir_prefix) or part

    def read(self, key: str) -> tuple[Parts, str]:
        """Return the path of a key and the key's last component. The reverse of `key`."""
        *components, name = key[len(self.prefix) :].lstrip("/").split("/")
        return self.path(components), name

    def path(self, components: Sequence[str]) -> Parts:
        """Return the path of the components of a key. The reverse of `components`."""
        parts: list[str] = []
        for component in components:
            if component == STAGED and parts:
                parts[-1] = self.temp_dir_prefix + parts[-1]
            else:
                parts.append(component.removeprefix("@") if component.startswith("@@") else component)
        return tuple(parts)
