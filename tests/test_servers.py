"""The fixtures themselves: what they keep from tests, and that servers end with their session.

That the servers store, refuse conditions, speak TLS, encrypt and limit credentials, `tests/stores` shows.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from kit.servers import SUPERVISE, S3Server


def test_keeps_settings_of_the_host_from_every_test() -> None:
    allowed = {"AWS_EC2_METADATA_DISABLED", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"}
    assert {name for name in os.environ if name.startswith("AWS_")} <= allowed


def test_keeps_a_secret_out_of_the_repr() -> None:
    assert "hush" not in repr(S3Server("minio", "http://127.0.0.1:9", "key", "hush"))


def test_ends_a_server_with_its_process_even_when_that_is_killed(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    killed = textwrap.dedent(
        """
        import os, signal, subprocess, sys
        child = [sys.executable, sys.argv[1], sys.argv[2], sys.executable, "-c", "import time; time.sleep(600)"]
        process = subprocess.Popen(child, stdin=subprocess.PIPE)
        print(process.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    # The pipe of standard output stays open in the server, so reading it to its end waits for the server's.
    subprocess.run(
        [sys.executable, "-c", killed, str(SUPERVISE), str(scratch)], stdout=subprocess.PIPE, timeout=30, check=False
    )
    assert not scratch.exists()
