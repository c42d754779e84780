"""Reservation of descriptors 0 to 2, to which libraries write warnings even in a program without standard streams."""

from __future__ import annotations

import os


def occupy_standard_descriptors() -> None:
    """Open the null device as each closed descriptor from 0 to 2, as in a daemon started with `2>&-`.

    Otherwise the next file, connection or staging memory would get that number, and warnings of C libraries would be
    written to it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # `os.open` returns the lowest free number: `number`, unless another thread opens a file at this moment.
            opened = os.open(os.devnull, os.O_RDWR)
            if opened > 2:
                os.close(opened)
            else:
                # Inheritable, because a started program such as the upload helper expects all three descriptors.
                os.set_inheritable(opened, True)
