"""An HTTP server that records what it is sent and answers by a script, for faults that no real server has on demand."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Seen:
    """A request as it arrived."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def path(self) -> str:
        return urlsplit(self.target).path


@dataclass
class Answer:
    """A reply. `cut` sends only so many bytes of the body, under the full length, and then closes the connection."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    cut: int | None = None
    drop: bool = False
    chunked: bool = False


Script = Callable[[Seen, int], Answer]


class ScriptedServer:
    """Answers each request with `script(request, how many came before)`, and remembers it."""

    def __init__(self, script: Script, tls: Path | None = None, *, remembers: bool = True) -> None:
        self.script = script
        self.seen: list[Seen] = []
        self.connections = 0
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # Head and body of a reply in one packet each would wait for each other.
            disable_nagle_algorithm = True

            def setup(self) -> None:
                with outer._lock:
                    outer.connections += 1
                super().setup()

            def log_message(self, *_: Any) -> None:
                pass

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                request = Seen(self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body)
                with outer._lock:
                    number = len(outer.seen)
                    if remembers:
                        outer.seen.append(request)
                self.answer(outer.script(request, number))

            def answer(self, answer: Answer) -> None:
                if answer.drop:
                    self.connection.shutdown(socket.SHUT_RDWR)
                    self.close_connection = True
                    return
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                if answer.chunked:
                    self.send_header("Transfer-Encoding", "chunked")
                elif "Content-Length" not in answer.headers:
                    self.send_header("Content-Length", str(len(answer.body)))
                self.end_headers()
                if self.command == "HEAD":
                    return
                if answer.chunked:
                    self.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(answer.body), answer.body))
                    return
                self.wfile.write(answer.body[: answer.cut])
                if answer.cut is not None:
                    self.wfile.flush()
                    self.connection.shutdown(socket.SHUT_RDWR)
                    self.close_connection = True

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(tls / "public.crt", tls / "private.key")
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.endpoint = f"{'http' if tls is None else 'https'}://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def scripted(script: Script, tls: Path | None = None, *, remembers: bool = True) -> Iterator[ScriptedServer]:
    """Serve by a script; over TLS with the certificate and the key in a folder."""
    server = ScriptedServer(script, tls, remembers=remembers)
    try:
        yield server
    finally:
        server.stop()


def error(status: int, code: str, *, extra: str = "", **headers: str) -> Answer:
    """An error as S3 words it."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>as scripted</Message>{extra}</Error>"
    return Answer(status, {"Content-Type": "application/xml", **headers}, body.encode())
