"""Start and end of a helper process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bucketpoint.forks import no_fork
from bucketpoint.transfer.helper.messages import Channel, descriptor_of

END_S = 5.0
"""Seconds that a helper gets to end before it is killed."""

LEFT_TO_TRAINER = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGTTIN", "SIGTTOU")
    if hasattr(signal, name)
)
"""Signals that a helper ignores. Schedulers send some of them to every process of a job. A terminal sends the last two
to stop background processes that use it."""

# The arguments are only paths and numbers, because every user of the machine can read them. `ps` shows the first line.
# The niceness is set before the imports, which would otherwise compete with training for a third of a second.
_PROGRAM = """# bucketpoint: uploads checkpoints beside training
import os, sys
try:
    os.nice(max(0, int(sys.argv[3]) - os.nice(0)))
except OSError:
    pass  # A sandbox may forbid this.
sys.path[:] = sys.argv[4:]
from bucketpoint.transfer.helper.worker import main
main(int(sys.argv[1]), int(sys.argv[2]))
"""


@dataclass(frozen=True)
class HelperProcess:
    """A helper that was started, and the channel to it.

    Attributes:
        alive: descriptor of the process, or None. The channel does not always show the helper's death: a process
            forked by native code may keep the channel's other end open.
    """

    channel: Channel
    process: subprocess.Popen[bytes]
    alive: int | None

    def leave_to_parent(self) -> None:
        """Release the process in a forked child, which cannot wait for it. `Channel` closes itself there."""
        if self.alive is not None:
            os.close(self.alive)
        self.process.returncode = 0

    def end(self) -> None:
        """Close the channel, which ends the process, and wait for the process. Kill it after `END_S`."""
        if self.alive is not None:
            os.close(self.alive)
        self.channel.close()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # Also after an interrupt of the wait.
            if self.process.poll() is None:
                self.process.kill()
                # A process that waits for a disk may take longer to die.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(END_S)

    def end_unattended(self) -> None:
        """End a helper to which no references are left.

        The calling thread may be training, so another thread waits for the helper, except at program end.
        """
        if threading.main_thread().is_alive():
            self.channel.close()
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=self.end, daemon=True).start()
                return
        self.end()


def start_process(environment: Mapping[str, str], *, nice: int, answers_within_s: float) -> HelperProcess:
    """Start a helper. `answers_within_s` is the limit of `Channel.limit_waits`.

    Raises:
        OSError, ValueError, RuntimeError: no process can be started.
    """
    # Pass on the interpreter's flags that affect imports and warnings (-I, -S, -X, -W), as multiprocessing does.
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    # No fork meanwhile: a data-loader worker that inherited the helper's end of the channel, or of the pipe on which
    # `subprocess` reports errors, would keep the trainer waiting until the worker ends.
    with no_fork, _signals_held_back():
        ours, theirs = socket.socketpair()
        channel = Channel(ours)
        try:
            with theirs:
                # Both ends would have the program's default timeout (`socket.setdefaulttimeout`).
                ours.settimeout(None)
                theirs.settimeout(None)
                channel.limit_waits(answers_within_s)
                numbers = (theirs.fileno(), os.getpid(), nice)
                process = subprocess.Popen(
                    [sys.executable, *flags, "-c", _PROGRAM, *map(str, numbers), *_paths()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env=environment,
                )
        except BaseException:
            channel.close()
            raise
    return HelperProcess(channel, process, descriptor_of(process.pid))


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """Block signals on this thread. A helper inherits the block, and lifts it once it ignores these signals."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_TRAINER)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _paths() -> list[str]:
    """Return `sys.path` as absolute paths: the program may have added the entry that contains bucketpoint."""
    entries: Sequence[object] = sys.path
    return [os.path.abspath(entry) for entry in entries if isinstance(entry, str)]
