"""The local server of `make bucket`, and the demo on it, end at Ctrl-C and leave nothing behind."""

from __future__ import annotations

import os
import pty
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import boto3
import pytest

ROOT = Path(__file__).resolve().parents[2]

# Programs that a shell starts in the background ignore Ctrl-C, and so would these tests' programs.
CTRL_C = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"


@contextmanager
def interrupted(tmp_path: Path, *command: str, stdin: int, until: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Run a program until a line that begins so; yield its output and the variables that it names.

    Afterwards it gets Ctrl-C, must end well, and must have left no server and no file.
    """
    env = os.environ | {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = (sys.executable, "-c", CTRL_C, *command)
    with subprocess.Popen(command, env=env, stdin=stdin, stdout=subprocess.PIPE, text=True) as process:
        try:
            lines: list[str] = []
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                if line.startswith(until):
                    break
            output = "".join(lines)
            assert process.poll() is None, output
            exports = dict(re.findall(r"export (\w+)=(\S+)", output))
            yield output, exports
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert not answers("127.0.0.1", exports)
    assert list(tmp_path.iterdir()) == []


def answers(address: str, exports: dict[str, str]) -> bool:
    try:
        socket.create_connection((address, urlsplit(exports["AWS_ENDPOINT_URL"]).port or 0), timeout=5).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("kind", ["minio", "moto"])
def test_prints_what_reaches_the_local_bucket_which_ctrl_c_ends(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if kind == "minio":
        request.getfixturevalue("bucketpoint_minio_binary")
    command = [sys.executable, str(ROOT / "tools/local_bucket.py"), *(["--moto"] if kind == "moto" else [])]
    with interrupted(tmp_path, *command, stdin=subprocess.DEVNULL, until="  bucketpoint") as (output, exports):
        assert f"{kind} runs".lower() in output.lower()
        assert sorted(exports) == ["AWS_ACCESS_KEY_ID", "AWS_ENDPOINT_URL", "AWS_SECRET_ACCESS_KEY"]
        for name, value in exports.items():
            monkeypatch.setenv(name, value)
        client = boto3.client("s3")
        client.put_object(Bucket="checkpoints", Key="a", Body=b"a")
        assert client.list_objects_v2(Bucket="checkpoints")["KeyCount"] == 1
        assert answers("127.0.0.1", exports)
        assert not answers("127.0.0.2", exports)  # as it would if the server listened on every address


@pytest.mark.broad
def test_runs_the_demo_and_looks_at_its_bucket_with_its_commands(
    bucketpoint_minio_binary: Path, tmp_path: Path
) -> None:
    terminal, stdin = pty.openpty()
    command = [sys.executable, str(ROOT / "examples/demo.py")]
    with interrupted(tmp_path, *command, stdin=stdin, until=f"  {Path(sys.executable).parent}/bucketpoint show") as (
        output,
        exports,
    ):
        assert "All is well" in output
        shown = ""
        for line in re.findall(r"^  (\S+/bucketpoint .*)$", output, re.MULTILINE):
            shown += subprocess.run(
                line.split(), env=os.environ | exports, check=True, stdout=subprocess.PIPE, text=True
            ).stdout
        assert "\n40 " in shown
        assert "step-40" in shown
    os.close(stdin)
    os.close(terminal)
