"""Descriptors 0 to 2, to which libraries write warnings even in a program that has no standard streams."""

from __future__ import annotations

import os


def occupy_standard_descriptors() -> None:
    """Open the null device as each of the descriptors 0 to 2 that is closed, as in a daemon started with `2>&-`.

    Otherwise the next file, connection or staging memory would get that number, and the warnings of C libraries too.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number, unless another thread opens a file at this moment.
            opened = os.open(os.devnull, os.O_RDWR)
            if opened > 2:
                os.close(opened)
            else:
                # For the helper, too: a started program expects to have all three.
                os.set_inheritable(opened, True)
