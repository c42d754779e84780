"""A real GCS server on 127.0.0.1 for tests: fake-gcs-server, in memory. No pytest here."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from kit.servers import _running


@dataclass(frozen=True)
class GCSServer:
    """A running server: how to reach it, and what tests do to it behind the back of the code under test."""

    endpoint: str
    pid: int = 0
    kind: str = "fake"

    def attempts(self, number: int) -> dict[str, Any]:
        """The storage options for so many attempts of each request."""
        return {"max_attempts": number}

    @property
    def options(self) -> dict[str, Any]:
        """`storage_options` in the style of gcsfs. A new dict each time: callers may change it."""
        return {"token": "anon", "endpoint_url": self.endpoint, "max_attempts": 2}

    @property
    def env(self) -> dict[str, str]:
        """The same settings as environment variables."""
        return {"STORAGE_EMULATOR_HOST": self.endpoint}

    def at(self, endpoint: str) -> GCSServer:
        """The same server, reached by another way, such as through a proxy."""
        return replace(self, endpoint=endpoint)

    def make_bucket(self, stem: str = "bucketpoint") -> str:
        """A new, empty bucket with a name that nobody else has."""
        name = f"{stem}-{os.urandom(6).hex()}"
        self.ask("POST", "/storage/v1/b?project=test", json.dumps({"name": name}).encode())
        return name

    def url(self, bucket: str, key: str = "") -> str:
        return f"gs://{bucket}/{key}" if key else f"gs://{bucket}"

    def keys(self, bucket: str, prefix: str = "") -> list[str]:
        """Every key under the prefix, sorted."""
        found: list[str] = []
        query = f"prefix={quote(prefix, safe='')}"
        while True:
            page = json.loads(self.ask("GET", f"/storage/v1/b/{bucket}/o?{query}"))
            found += [item["name"] for item in page.get("items", [])]
            if not page.get("nextPageToken"):
                return sorted(found)
            query = f"prefix={quote(prefix, safe='')}&pageToken={quote(page['nextPageToken'], safe='')}"

    def open_uploads(self, bucket: str, prefix: str = "") -> list[str]:
        """The keys of multipart uploads under way: there are none here. See `gcs_xml`."""
        return []

    def read(self, bucket: str, key: str) -> bytes:
        return self.ask("GET", f"/storage/v1/b/{bucket}/o/{quote(key, safe='')}?alt=media")

    def generation(self, bucket: str, key: str) -> str:
        return str(json.loads(self.ask("GET", f"/storage/v1/b/{bucket}/o/{quote(key, safe='')}"))["generation"])

    def write(self, bucket: str, key: str, body: bytes) -> None:
        path = f"/upload/storage/v1/b/{bucket}/o?uploadType=media&name={quote(key, safe='')}"
        self.ask("POST", path, body, "application/octet-stream")

    def delete(self, bucket: str, key: str) -> None:
        self.ask("DELETE", f"/storage/v1/b/{bucket}/o/{quote(key, safe='')}")

    def ask(self, method: str, path: str, body: bytes | None = None, kind: str = "application/json") -> bytes:
        headers = {} if body is None else {"Content-Type": kind}
        request = urllib.request.Request(f"{self.endpoint}{path}", body, headers, method=method)
        # Without the host's proxies.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=60) as answer:
            content: bytes = answer.read()
            return content


@contextmanager
def fake_gcs(binary: Path) -> Iterator[GCSServer]:
    """fake-gcs-server in a process of its own. It keeps everything in memory."""

    def command(scratch: Path, port: int) -> list[str]:
        flags = ("-backend", "memory", "-scheme", "http", "-host", "127.0.0.1", "-log-level", "error")
        address = f"127.0.0.1:{port}"
        return [str(binary), *flags, "-port", str(port), "-public-host", address, "-external-url", f"http://{address}"]

    with _running(command, {}) as (_, port, pid):
        yield GCSServer(f"http://127.0.0.1:{port}", pid=pid)
