"""Counts what a plain use of bucketpoint runs: a blocking save, a save in the background and a load of 21 items.

    python tools/walk.py [--files]

It prints the functions, files and distinct lines of bucketpoint that run, and the modules of it that are imported.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

SOURCE = str(Path(__file__).resolve().parent.parent / "src" / "bucketpoint")


def walk(folder: str) -> tuple[set[tuple[str, int, str]], set[tuple[str, int]]]:
    """Save and load in `folder`. Return the functions, as file, line and name, and the lines that have run."""
    functions, lines = set[tuple[str, int, str]](), set[tuple[str, int]]()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        # The bodies of modules and classes run at the import, and are no functions.
        if not code.co_filename.startswith(SOURCE) or not code.co_flags & inspect.CO_OPTIMIZED:
            return None
        if event == "call":
            functions.add((code.co_filename, code.co_firstlineno, code.co_name))
        if event == "line":
            lines.add((code.co_filename, frame.f_lineno))
        return trace

    import bucketpoint

    state = {f"layer{number}": torch.randn(64, 64) for number in range(20)} | {"step": 1}
    threading.settrace(trace)
    sys.settrace(trace)
    try:
        writer = bucketpoint.BucketWriter()
        dcp.save(state, checkpoint_id=f"{folder}/step-1", storage_writer=writer)
        bucketpoint.async_save(state, f"{folder}/step-2", storage_writer=writer).result()
        dcp.load(state, checkpoint_id=f"{folder}/step-2", storage_reader=bucketpoint.BucketReader())
    finally:
        sys.settrace(None)
        threading.settrace(None)
    return functions, lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", action="store_true", help="also print the functions and lines of each file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        functions, lines = walk(f"file://{folder}")
    files = Counter(path for path, _, _ in functions)
    modules = [name for name in sys.modules if name.split(".")[0] == "bucketpoint"]
    print(f"{len(functions)} functions in {len(files)} files, {len(lines)} lines; {len(modules)} modules imported")
    if arguments.files:
        by_file = Counter(path for path, _ in lines)
        for path, count in by_file.most_common():
            print(f"{count:5} lines {files[path]:4} functions  {path.removeprefix(SOURCE)[1:]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
