"""Starts an S3 server with an empty bucket on 127.0.0.1, prints how to reach it, and ends it at Ctrl-C with its data.

The server is MinIO, found or downloaded as tools/get_minio.py does it, or else moto. Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# The folder of the kit itself would put its `http` before the standard library's.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import get_minio
import get_uv
from kit.supervise import supervised

BUCKET = "checkpoints"
PORT = 9000
"""MinIO's own, and that of the documents."""

MOTO = ("moto[s3]>=5.1", "flask", "flask-cors")
"""What moto's server of S3 needs; its extra `server` has 60 packages for other services."""

START_S = 120

# Settings of the user's own servers and accounts must not reach this one.
SETTINGS = ("AWS_", "MINIO_", "MOTO_")
SPOILERS = ("AWS_ENDPOINT_URL_S3", "AWS_PROFILE", "AWS_SECURITY_TOKEN", "AWS_SESSION_TOKEN")
"""Variables of other accounts that count more than those of `env`, or are sent with them and refused."""


@dataclass(frozen=True)
class LocalBucket:
    """A running server with one empty bucket, `checkpoints`."""

    kind: str
    endpoint: str
    key: str
    secret: str

    @property
    def env(self) -> dict[str, str]:
        """The three variables with which boto3, and so bucketpoint, reaches the server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
        }

    def exports(self) -> str:
        """Return the lines to type in another shell, which probably has this one's variables."""
        spoilers = [name for name in SPOILERS if name in os.environ]
        lines = [f"  unset {' '.join(spoilers)}"] if spoilers else []
        return "\n".join([*lines, *(f"  export {name}={value}" for name, value in self.env.items())])


@contextlib.contextmanager
def local_bucket(minio: Path | None) -> Iterator[LocalBucket]:
    """Run MinIO, or moto without it, on a temporary folder and on 127.0.0.1 only, and on PORT if that is free."""
    # Before there is a folder to delete: this may take minutes, or end the program.
    python = [] if minio else _moto()
    port = _free(PORT) or _free(0)
    # The supervisor deletes the folder, also if this process is killed.
    scratch = Path(tempfile.mkdtemp(prefix="bucketpoint-bucket-"))
    found = LocalBucket("MinIO" if minio else "moto", f"http://127.0.0.1:{port}", "bucketpoint", secrets.token_hex(16))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
    if minio:
        # MinIO takes the folders in its own for buckets.
        (scratch / "data" / BUCKET).mkdir(parents=True)
        (scratch / "certificates").mkdir()
        command = [str(minio), "server", "--quiet", "--address", f"127.0.0.1:{port}"]
        command += ["--certs-dir", str(scratch / "certificates"), str(scratch / "data")]
        # CI_CD: without it MinIO refuses a folder of the disk that has the system.
        environment |= {"MINIO_ROOT_USER": found.key, "MINIO_ROOT_PASSWORD": found.secret}
        environment |= {"MINIO_BROWSER": "off", "MINIO_UPDATE": "off", "MINIO_CI_CD": "1", "HOME": str(scratch)}
    else:
        command = [*python, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with (scratch / "log").open("wb") as log, supervised(scratch, command, environment, log) as process:
        _wait(found, process, scratch / "log")
        yield found


def _free(port: int) -> int:
    """The port if it is free, any free one for 0, and 0 if it is taken."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return 0
        return int(probe.getsockname()[1])


def _moto() -> list[str]:
    """The command of a Python that has moto's server."""
    uv = get_uv.obtain()
    if uv is None:
        raise SystemExit("local_bucket: there is neither MinIO nor uv here (see above)")
    return [str(uv), "run", "--quiet", "--no-project", *(f"--with={each}" for each in MOTO), "python"]


def _wait(found: LocalBucket, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server answers, and make moto's bucket."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    path, method = ("minio/health/ready", "GET") if found.kind == "MinIO" else (BUCKET, "PUT")  # moto asks for no key
    deadline = time.monotonic() + START_S
    while True:
        try:
            direct.open(urllib.request.Request(f"{found.endpoint}/{path}", method=method), timeout=5).close()
            return
        except OSError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                said = log.read_text(errors="replace")[-2000:] if log.exists() else ""
                raise SystemExit(f"local_bucket: {found.kind} did not start: {said or error}") from error
            time.sleep(0.1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--moto", action="store_true", help="run moto though MinIO is here or can be downloaded")
    args = parser.parse_args()
    # The end of the terminal, and `kill`, are to leave nothing behind either.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        with local_bucket(None if args.moto else get_minio.obtain(build=False)) as found:
            print(f"{found.kind} runs with an empty bucket, s3://{BUCKET}, until Ctrl-C, which deletes it.")
            print(f"In another shell:\n\n{found.exports()}\n\n  bucketpoint doctor s3://{BUCKET}/run", flush=True)
            signal.pause()
    except KeyboardInterrupt:
        print(flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
