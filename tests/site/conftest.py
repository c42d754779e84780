"""The built site on a server of its own. Without what `make site` builds with nothing here is collected."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser.conftest import chromium, page_at

__all__ = ["chromium", "page_at"]

collect_ignore_glob = [] if all(map(importlib.util.find_spec, ("mkdocs", "playwright"))) else ["test_*.py"]

BUILT = Path(__file__).parents[2] / "build" / "site"


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        """Say nothing: the tests name the requests that fail."""


@pytest.fixture(scope="session")
def site() -> Iterator[str]:
    """The URL of the built site."""
    if not (BUILT / "index.html").is_file():
        pytest.fail("build/site is not built: run `make site`")
    handler = functools.partial(_Quiet, directory=str(BUILT))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
