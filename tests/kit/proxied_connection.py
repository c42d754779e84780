"""One connection of the proxy: requests, their faults and their answers, one after the other."""

from __future__ import annotations

import contextlib
import email.utils
import itertools
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kit.faults import (
    CutReply,
    CutRequest,
    Delay,
    ErrorInBody,
    ExpireCredentials,
    Fault,
    FlipReply,
    FlipRequest,
    Kill,
    Player,
    Refuse,
    Reset,
    Script,
    Slow,
    Stale,
    Stall,
)
from kit.http import Closed, Head, Pace, Stream, Upstream, Wire, Write, move_body, nowhere
from kit.kinds import NEXT_PART, Api, StoreRequest, names_key_in_body

REMEMBERED_BYTES = 8 << 20
"""Limit on replies kept for stale answers; larger ones are never served again."""

LONGEST_NAME_BYTES = 16 << 10
"""Limit on the bytes before an upload's data that are searched for the key: 1,024 bytes and a few facts, escaped."""

REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    429: "Too Many Requests",
    500: "Internal Server Error",
}


SETTLED_S = 1.0
"""Seconds to wait for exchanges under way before they are counted."""

_DEAD = Reset()
_EXPIRED = ExpireCredentials()


@dataclass
class RecordedRequest:
    """One request that reached the proxy. Times are on the machine's monotonic clock, sizes are of bodies."""

    number: int
    connection: str
    request: StoreRequest
    start: float
    end: float = 0.0
    status: int = 0
    """Status of the store's answer, received by the client or not; 0 if the store was not asked, or did not answer."""
    sent: int = 0
    received: int = 0
    fault: str | None = None


@dataclass
class Counts:
    """Requests, and bytes of their bodies and of those of replies, by kind; faults by name."""

    requests: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)

    def add(self, exchange: RecordedRequest) -> None:
        """Count one finished exchange."""
        kind = exchange.request.kind
        self.requests[kind] += 1
        self.sent[kind] += exchange.sent
        self.received[kind] += exchange.received
        if exchange.fault is not None:
            self.faults[exchange.fault] += 1


class Board:
    """State shared by all connections of a proxy: the script, finished requests, and first answers for stale reads."""

    def __init__(self, script: Script) -> None:
        self._lock = threading.Condition()
        self._under_way = 0
        self._numbers = itertools.count(1)
        self._first: dict[tuple[str, str, str | None], bytes] = {}
        self._expired: set[str] = set()
        self.exchanges: list[RecordedRequest] = []
        self.total = Counts()
        self.play(script)

    def play(self, script: Script) -> None:
        with self._lock:
            self._player = Player(script)
            self._dead = False
            self._expired.clear()
            self._first.clear()

    def begin(self, connection: str, request: StoreRequest) -> tuple[RecordedRequest, Fault | None]:
        with self._lock:
            player, dead = self._player, self._dead
            number = next(self._numbers)
            self._under_way += 1
            expired = request.access_key in self._expired
        fault: Fault | None = None
        if dead:
            fault = _DEAD
        elif expired:
            fault = _EXPIRED
        else:
            fault = player.choose(request)
        exchange = RecordedRequest(number, connection, request, time.monotonic())
        if fault is not None and not dead:
            exchange.fault = fault.name
        return exchange, fault

    def end(self, exchange: RecordedRequest) -> None:
        exchange.end = time.monotonic()
        with self._lock:
            self.exchanges.append(exchange)
            self.total.add(exchange)
            self._under_way -= 1
            self._lock.notify_all()

    def settled(self) -> list[RecordedRequest]:
        """Return the finished exchanges.

        Waits for those under way: a client has its answer a moment before the exchange ends.
        """
        with self._lock:
            self._lock.wait_for(lambda: not self._under_way, SETTLED_S)
            return list(self.exchanges)

    def clear(self) -> None:
        """Forget the finished exchanges.

        Waits as `settled` does: an exchange whose answer the client already has must not be counted later.
        """
        with self._lock:
            self._lock.wait_for(lambda: not self._under_way, SETTLED_S)
            self.exchanges = []

    def remembers(self, request: StoreRequest) -> bool:
        return self._player.remembers(request)

    def remembered(self, request: StoreRequest) -> bytes | None:
        return self._first.get((request.method, request.target, request.range))

    def remember(self, request: StoreRequest, reply: bytes) -> None:
        self._first.setdefault((request.method, request.target, request.range), reply)

    def expire(self, access_key: str) -> None:
        with self._lock:
            self._expired.add(access_key)

    def killed(self) -> None:
        with self._lock:
            self._dead = True


class Aborted(Exception):
    """Raised if a fault has ended both connections."""


@dataclass
class Connection:
    """One client connection and its counterpart to the server, served in turn: request, response, request, …"""

    client: Stream
    upstream: Upstream
    wire: Wire
    total: Pace
    board: Board
    name: str
    _server: Stream | None = None
    _up: Pace = field(init=False)
    _down: Pace = field(init=False)

    def __post_init__(self) -> None:
        self._up = Pace(self.wire.bytes_per_s, self.total)
        self._down = Pace(self.wire.bytes_per_s, self.total)

    def serve(self) -> None:
        try:
            while raw := self.client.head():
                if not self._exchange(Head.parse(raw)):
                    break
        except Aborted:
            self.client.abort()
        except (Closed, OSError):
            pass  # The client sees the end of its connection, as it would without a proxy.
        finally:
            self._drop_server()

    # -- one request --------------------------------------------------------------------------------------------------

    def _exchange(self, head: Head) -> bool:
        """Serve one request. Returns True if the connection continues."""
        beginning = b""
        if names_key_in_body(head) and not head.expects_continue:
            beginning = self.client.peek(NEXT_PART, LONGEST_NAME_BYTES)
        note, fault = self.board.begin(self.name, StoreRequest.of(head, beginning))
        try:
            if self.wire.delay_s:
                time.sleep(self.wire.delay_s)
            match fault:
                case Delay(seconds=seconds):
                    time.sleep(seconds)
                case Slow(bytes_per_s=rate):
                    return self._pass(head, note, fault, up=Pace(rate, self.total), down=Pace(rate, self.total))
                case Kill(acted=False):
                    self._kill(fault)
                case Reset(acted=False):
                    raise Aborted
                case Stall(seconds=seconds, acted=False):
                    time.sleep(seconds)
                    raise Aborted
                case Refuse(status=status, code=code, acted=False):
                    return self._refuse(head, note, status, code)
                case ErrorInBody(code=code, acted=False):
                    return self._refuse(head, note, 200, code)
                case ExpireCredentials():
                    self.board.expire(note.request.access_key)
                    # https://cloud.google.com/storage/docs/json_api/v1/status-codes#401-unauthorized
                    refusal = (400, "ExpiredToken") if note.request.api is Api.S3 else (401, "authError")
                    return self._refuse(head, note, *refusal)
                case Stale():
                    remembered = self.board.remembered(note.request)
                    if remembered is not None:
                        self._drop_request(head, note)
                        self.client.write(remembered)
                        return head.keeps_alive
            return self._pass(head, note, fault, up=self._up, down=self._down)
        finally:
            self.board.end(note)

    def _pass(self, head: Head, note: RecordedRequest, fault: Fault | None, *, up: Pace, down: Pace) -> bool:
        """Ask the store, and pass the answer on, as far as the fault allows."""
        server = self._ask(head)
        response: Head | None = None
        if head.expects_continue:
            response = self._response(server)
            if response.first[1] == "100":
                self.client.write(response.raw)
                response = None
        if response is None:
            if isinstance(fault, CutRequest):
                self.client.pump(server.write, int(note.request.nbytes * fault.at), up)
                raise Aborted
            flipped = _flipping(server.write, note.request.nbytes, fault) if isinstance(fault, FlipRequest) else None
            with contextlib.suppress(ConnectionError):  # An early refusal closes the way up; its answer is still read.
                note.sent = move_body(head, self.client, flipped or server.write, up)
            response = self._response(server)
            while response.first[1] == "100":
                response = self._response(server)
        note.status = int(response.first[1])
        bodiless = head.first[0] == "HEAD" or response.first[1] in ("204", "304")
        if fault is not None and getattr(fault, "acted", False):
            return self._lose(head, response, note, fault, bodiless=bodiless)
        if self.board.remembers(note.request) and not response.chunked and response.length <= REMEMBERED_BYTES:
            kept = bytearray(response.raw)
            if not bodiless:
                note.received = move_body(response, server, kept.extend, down)
            self.board.remember(note.request, bytes(kept))
            self.client.write(bytes(kept))
            return head.keeps_alive and response.keeps_alive
        self.client.write(response.raw)
        if bodiless:
            return head.keeps_alive and response.keeps_alive
        write: Write = self.client.write
        if isinstance(fault, CutReply) and not response.chunked:
            server.pump(write, int(response.length * fault.at), down)
            raise Aborted
        if isinstance(fault, FlipReply) and note.status < 300:
            write = _flipping(write, response.length, fault)
        note.received = move_body(response, server, write, down)
        return head.keeps_alive and response.keeps_alive

    def _lose(self, head: Head, response: Head, note: RecordedRequest, fault: Fault, *, bodiless: bool) -> bool:
        """Drop the answer of a store that has carried out the request, and act as the fault says."""
        server = self._server
        if server is not None and not bodiless:
            note.received = move_body(response, server, nowhere, self._down)
        match fault:
            case Refuse(status=status, code=code):
                self._answer(note.request, status, code)
                return head.keeps_alive
            case ErrorInBody(code=code):
                self._answer(note.request, 200, code)
                return head.keeps_alive
            case Stall(seconds=seconds):
                time.sleep(seconds)
            case Kill():
                self._kill(fault)
        raise Aborted

    # -- the two sides ------------------------------------------------------------------------------------------------

    def _ask(self, head: Head) -> Stream:
        """Send the head to the store, over the existing connection or a new one."""
        if self.upstream.host_header is not None:
            head = head.with_header("Host", self.upstream.host_header)
        if self._server is None or self._server.ended():
            self._drop_server()
            self._server = self.upstream.connect()
        self._server.write(head.raw)
        return self._server

    def _response(self, server: Stream) -> Head:
        raw = server.head()
        if not raw:
            raise Closed("the server ended the connection")
        return Head.parse(raw)

    def _refuse(self, head: Head, note: RecordedRequest, status: int, code: str) -> bool:
        """Answer in the store's place."""
        if head.expects_continue:
            # The client withholds its body, and its next bytes on this connection cannot be predicted: close it.
            self._answer(note.request, status, code, closing=True)
            return False
        self._drop_request(head, note)
        self._answer(note.request, status, code)
        return head.keeps_alive

    def _drop_request(self, head: Head, note: RecordedRequest) -> None:
        note.sent = move_body(head, self.client, nowhere, self._up)

    def _answer(self, request: StoreRequest, status: int, code: str, *, closing: bool = False) -> None:
        body = _error(request, status, code)
        lines = [
            f"HTTP/1.1 {status} {REASONS.get(status, 'Error')}",
            f"Content-Type: application/{'json' if request.api is Api.GCS_JSON else 'xml'}",
            f"Content-Length: {len(body)}",
            f"Date: {email.utils.formatdate(usegmt=True)}",
            *(["Connection: close"] if closing else []),
        ]
        self.client.write("\r\n".join([*lines, "", ""]).encode() + body)

    def _drop_server(self) -> None:
        if self._server is not None:
            self._server.abort()
            self._server = None

    def _kill(self, fault: Kill) -> None:
        for group in fault.groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        if not fault.others_live:
            self.board.killed()
        raise Aborted


def _error(request: StoreRequest, status: int, code: str) -> bytes:
    """Return an error body in the format of the API that the client uses."""
    if request.api is Api.GCS_JSON:
        reason = {"domain": "global", "reason": code, "message": "by script"}
        return json.dumps({"error": {"code": status, "message": "by script", "errors": [reason]}}).encode()
    text = f"<Error><Code>{code}</Code><Message>by script</Message></Error>"
    return f"<?xml version='1.0' encoding='UTF-8'?>\n{text}".encode()


def _flipping(write: Callable[[memoryview], None], nbytes: int, fault: FlipRequest | FlipReply) -> Write:
    """Return a `Write` that passes bytes on, and flips the lowest bit of one of them."""
    target, passed = min(int(nbytes * fault.at), nbytes - 1), 0

    def through(data: memoryview) -> None:
        nonlocal passed
        if passed <= target < passed + len(data):
            changed = bytearray(data)
            changed[target - passed] ^= 1
            data = memoryview(changed)
        passed += len(data)
        write(data)

    return through
