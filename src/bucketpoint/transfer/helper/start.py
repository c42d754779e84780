"""The start and the end of a helper process."""

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
from bucketpoint.transfer.helper.channel import Channel, descriptor_of

END_S = 5.0
"""Seconds that a helper gets to end before it is killed."""

LEFT_TO_TRAINER = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGTTIN", "SIGTTOU")
    if hasattr(signal, name)
)
"""Signals that a helper ignores. Schedulers send some to every process of a job, and with the last two a terminal stops
a process of another group that writes to it."""

# Only paths and numbers are arguments: anybody on the machine can read them. The first line is visible in `ps`.
# Niceness before imports: they would otherwise compete with training for a third of a second.
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
        alive: descriptor of the process. The channel alone does not show its end: a fork by native code may hold the
            other end.
    """

    channel: Channel
    process: subprocess.Popen[bytes]
    alive: int | None

    def leave_to_parent(self) -> None:
        """Forget the process in a fork, of which it is no child. The channel is closed there automatically."""
        if self.alive is not None:
            os.close(self.alive)
        self.process.returncode = 0

    def end(self) -> None:
        """Close the channel, which ends the process, and wait for it. It is killed if it takes too long."""
        if self.alive is not None:
            os.close(self.alive)
        self.channel.close()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # Also if the program was interrupted here.
            if self.process.poll() is None:
                self.process.kill()
                # A process that waits for a disk may take longer to die.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(END_S)

    def end_unattended(self) -> None:
        """End a helper without references.

        The thread that dropped it may train, so it only closes the channel. At program end it waits for the helper.
        """
        if threading.main_thread().is_alive():
            self.channel.close()
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=self.end, daemon=True).start()
                return
        self.end()


def start_process(environment: Mapping[str, str], *, nice: int, answers_within_s: float) -> HelperProcess:
    """Start a helper.

    Args:
        environment: environment variables of the helper.
        nice: niceness of the process as a whole.
        answers_within_s: seconds after which a message that is sent or received in part counts as broken off.

    Raises:
        OSError, ValueError, RuntimeError: no process can be started.
    """
    # The flags that decide which modules are found and which of them run (-I, -S, -X, -W), as multiprocessing does.
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    # A worker of a data loader that inherits the helper's end of the channel, or of the pipe by which `subprocess`
    # reports errors, would keep the trainer waiting for as long as it lives.
    with no_fork, _signals_held_back():
        ours, theirs = socket.socketpair()
        channel = Channel(ours)
        try:
            with theirs:
                # A program's default timeout, which both ends would share.
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
    """Block signals on this thread: a helper inherits that, and unblocks them once it ignores them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_TRAINER)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _paths() -> list[str]:
    """Return `sys.path`: a program may have found bucketpoint by its own path."""
    entries: Sequence[object] = sys.path
    return [os.path.abspath(entry) for entry in entries if isinstance(entry, str)]
