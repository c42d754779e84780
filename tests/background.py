"""Who uploads beside training in a run of the tests: a process or threads, whatever the size of the state.

`BUCKETPOINT_TEST_UPLOADS=process pytest ...` runs every asynchronous test with a process, `thread` with threads.
Without it the size decides, as for users, and nearly all states of the tests are small.
"""

from __future__ import annotations

import os

LEAST_BYTES = {"process": 0, "thread": 1 << 62}


def choose_uploads() -> None:
    """Called in each process of the tests that saves."""
    chosen = os.environ.get("BUCKETPOINT_TEST_UPLOADS")
    if chosen:
        from bucketpoint.dcp.saving import uploads

        uploads.LEAST_BYTES = LEAST_BYTES[chosen]
