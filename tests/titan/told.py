"""A program's function that is told of commits."""

from __future__ import annotations

import os

from bucketpoint import CommitInfo


def note(info: CommitInfo) -> None:
    with open(os.environ["TOLD"], "a") as file:
        file.write(f"{info.step} {info.url}\n")
