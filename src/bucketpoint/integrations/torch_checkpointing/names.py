"""Names of objects: paths of torch_checkpointing to keys and back, and the last component of each key.

A path of components `a/b` has the key `a/b/` with one of these names behind it:

- `@f.TOKEN.ATTEMPT.RANDOM`: the bytes of a file. Each write has a key of its own, and the newest one is the file.
- `@l.TOKEN.ATTEMPT.RANDOM`: a file that was renamed to this path: JSON that names the object with its bytes.
- `@d`: the manifest of a directory that was renamed to this path.
- `@dx.TOKEN`: a marker. What was at or below this path before the token is gone: deleted, or renamed, and then its
  objects may be needed elsewhere. A marker that is not empty is of a rename that has begun, and hides nothing.

Objects with other names are ignored.

A temporary directory `tmp_a` has the key `a/@tmp/`: one listing below `a/` finds a save and the place for its commit.
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

FILE, LINK, MANIFEST, MARKER, STAGED = "@f.", "@l.", "@d", "@dx.", "@tmp"
TOKEN_NAME = re.compile(r"(@f\.|@l\.|@dx\.)([0-9a-f]{16})(?:\.([A-Za-z0-9_-]*)\.[0-9a-f]{8})?")
"""Kind, token and attempt of the name of a file, a link or a marker."""

_lock = ProcessLock()
_last = 0


def next_token(after: str = "") -> str:
    """Return a name that sorts after all earlier ones of this process, after `after`, and by time among processes."""
    global _last
    with _lock:
        _last = max(time.time_ns(), _last + 1, int(after or "0", 16) + 1)
        return f"{_last:016x}"


def object_name(kind: str, token: str, attempt: str) -> str:
    """Return the last component of the key of a new file or link."""
    return f"{kind}{token}.{attempt}.{secrets.token_hex(4)}"


@dataclass(frozen=True)
class Names:
    """Paths and keys of one root.

    Attributes:
        root: the root's URL. A path that begins with it, also with the slash that `Path` drops, is a path below it.
        prefix: key prefix of the root.
        temp_dir_prefix: prefix of the names of temporary directories.
    """

    root: str
    prefix: str
    temp_dir_prefix: str

    def parts(self, path: str | os.PathLike[str]) -> Parts:
        """Return the components of a path below the root.

        Raises:
            InvalidURLError: the path leaves the root, or is a URL elsewhere.
        """
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

    def key(self, parts: Parts, *behind: str) -> str:
        """Return the key of a path with `behind` as its last components."""
        return "/".join((*([self.prefix] if self.prefix else []), *self.components(parts), *behind))

    def components(self, parts: Parts) -> list[str]:
        """Return the components of the key of a path, without the root's."""
        found = []
        for part in parts:
            rest = part.removeprefix(self.temp_dir_prefix)
            staged = bool(rest) and rest != part
            found.append(_escaped(rest if staged else part))
            if staged:
                found.append(STAGED)
        return found

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


def _escaped(part: str) -> str:
    return f"@{part}" if part.startswith("@") else part
