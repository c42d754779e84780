"""Loads a checkpoint by the independent reader, in a process that can import neither torch nor bucketpoint.

    python tests/golden/alone.py URL
    python tests/golden/alone.py --import MODULE

The first prints the description of each value by its name as JSON. The second shows what is blocked.
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

    state = independent_reader.load(sys.argv[1])
    found = {name: described(value if dtype is None else (dtype, value)) for name, (dtype, value) in state.items()}
    assert not BLOCKED & {name.partition(".")[0] for name in sys.modules}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
