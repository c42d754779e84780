"""Memory and CPU time of a process, from the kernel's own account of it (Linux). No measuring."""

from __future__ import annotations

import os
from pathlib import Path

_FIELDS = ("VmHWM", "RssAnon", "RssFile", "RssShmem")


def forget_peak(process: int | str = "self") -> None:
    """Let `VmHWM` begin anew (proc(5), clear_refs)."""
    Path(f"/proc/{process}/clear_refs").write_text("5")


def cpu_s(process: int) -> float:
    """CPU seconds of a process so far, user and system, in steps of 10 ms."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory(process: int | str = "self") -> dict[str, int]:
    """Bytes: the fields of /proc/PID/status by their names, and `anonymous`, which leaves out pages of files."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    found = {name: int(fields[name].split()[0]) << 10 for name in _FIELDS}
    return {**found, "anonymous": found["RssAnon"] + found["RssShmem"]}
