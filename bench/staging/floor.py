"""The floor of what a background save can cost: a process of niceness 19 that only uploads.

The first line says how many tensors of how many bytes; each further line a URL to save them to. Answers with a line.
"""

from __future__ import annotations

import os

import torch.distributed.checkpoint as dcp

from bench import state as states
from bench.lines import commands, speaker
from bucketpoint import S3Writer


def main() -> None:
    say = speaker()
    os.nice(19)
    lines = commands()
    asked = next(lines)
    state = states.equal_tensors(asked["tensors"], asked["nbytes"])
    say({})
    writer = S3Writer(progress=False)
    for command in lines:
        dcp.save(state, checkpoint_id=command["url"], storage_writer=writer, no_dist=True)
        say({})


if __name__ == "__main__":
    main()
