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
        from bucketpoint.transfer import TransferOptions

        uploads.LEAST_BYTES = LEAST_BYTES[chosen]
        # The default of the constructor, which has been made from that of the class.
        defaults = TransferOptions.__init__.__defaults__ or ()
        TransferOptions.__init__.__defaults__ = tuple("auto" if each == "thread" else each for each in defaults)
