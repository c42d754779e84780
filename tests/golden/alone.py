"""Loads checkpoints by the independent reader, in a process that can import neither torch nor bucketpoint.

    python tests/golden/alone.py URL [NAME]
    python tests/golden/alone.py --import MODULE

The first prints JSON: the description of each value by its name, or the error. The second shows what is blocked.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BLOCKED = frozenset({"torch", "bucketpoint", "awscrt", "fsspec", "safetensors"})
ROOT = Path(__file__).resolve().parents[2]


class Block:
    """A finder before all others that refuses these modules."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> None:
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)


def main() -> None:
    sys.meta_path.insert(0, Block())
    if sys.argv[1] == "--import":
        importlib.import_module(sys.argv[2])
        return
    sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests")]
    import independent_reader
    from golden.describe import described

    try:
        state = independent_reader.load(*sys.argv[1:])
    except Exception as error:  # noqa: BLE001 (told to the test)
        print(json.dumps({"error": [type(error).__name__, str(error)]}))
        return
    found: dict[str, Any] = {}
    for name, (dtype, value) in state.items():
        refused = isinstance(value, Exception)
        found[name] = {"refused": str(value)} if refused else described(value if dtype is None else (dtype, value))
    assert not BLOCKED & {name.partition(".")[0] for name in sys.modules}
    print(json.dumps({"state": found}))


if __name__ == "__main__":
    main()
