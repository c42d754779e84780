"""A real Azure blob server on 127.0.0.1 for tests: Azurite, in memory. No pytest here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.servers import _running

# Azurite's documented account, the same in every installation.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@dataclass(frozen=True)
class AzureServer:
    """A running server, and what `adlfs` and tests need to reach it."""

    endpoint: str
    pid: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """`storage_options` of adlfs. A new dict each time: callers may change it."""
        where = f"BlobEndpoint={self.endpoint}/{ACCOUNT};"
        said = f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};{where}"
        return {"connection_string": said}

    @property
    def env(self) -> dict[str, str]:
        """What adlfs reads from the environment."""
        return {"AZURE_STORAGE_CONNECTION_STRING": self.options["connection_string"]}

    def make_container(self) -> str:
        """A new, empty container with a name that nobody else has."""
        from azure.storage.blob import BlobServiceClient

        name = f"bucketpoint-{os.urandom(6).hex()}"
        with BlobServiceClient.from_connection_string(self.options["connection_string"]) as client:
            client.create_container(name)
        return name


def find() -> Path | None:
    """`$AZURITE`, `azurite-blob` on the PATH, or the checkout's own; None if there is none."""
    here = Path(__file__).resolve().parent.parent / ".cache" / "azurite" / "node_modules" / ".bin" / "azurite-blob"
    named = os.environ.get("AZURITE")
    found = shutil.which(named or "azurite-blob")
    if found is None and not named and os.access(here, os.X_OK):
        found = str(here)
    return Path(found) if found else None


@contextmanager
def azurite(binary: Path) -> Iterator[AzureServer]:
    """Azurite's blob service in a process of its own. It keeps everything in memory."""

    def command(scratch: Path, port: int) -> list[str]:
        place = ("--blobHost", "127.0.0.1", "--blobPort", str(port))
        quiet = ("--silent", "--disableTelemetry")
        return [str(binary), *quiet, "--inMemoryPersistence", "--skipApiVersionCheck", *place]

    with _running(command, {}) as (_, port, pid):
        yield AzureServer(f"http://127.0.0.1:{port}", pid=pid)
