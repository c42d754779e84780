"""A program that saves beside training, for tests in which it, or the process that uploads for it, is killed.

It prints a line of JSON once the upload is under way, with the process id of the helper, and then does as it is told.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch

import bucketpoint
from bucketpoint import S3Writer, TransferOptions

NBYTES = 16 << 20


def state(value: int) -> dict[str, Any]:
    return {"model": {"weight": torch.full((NBYTES,), value, dtype=torch.uint8)}, "step": value}


def main(url: str, options: str, end: str) -> None:
    transfer = TransferOptions(background="process", part_bytes=5 << 20, connections=2, single_put_bytes=1 << 20)
    writer = S3Writer(storage_options=json.loads(options), transfer=transfer)
    handle = bucketpoint.async_save(state(1), checkpoint_id=url, storage_writer=writer)
    while handle.progress is None:
        time.sleep(0.01)
    fork = 0
    if end == "fork":
        fork = os.fork()
        if not fork:
            # A worker of a data loader, which outlives a trainer that is killed.
            time.sleep(120)
            os._exit(0)
    print(json.dumps({"helper": writer.uploads.process_id, "fork": fork}), flush=True)
    if end == "return":
        return
    if end == "raise":
        raise ZeroDivisionError
    # Until it is killed.
    handle.result()


if __name__ == "__main__":
    main(*sys.argv[1:])
