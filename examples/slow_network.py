"""A loopback proxy that stands between a training job and an S3 server: it paces uploads and counts what passes."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import final

CHUNK = 64 << 10


@dataclass
class Traffic:
    """What passed through the slow network so far."""

    requests: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    received: int = 0

    def since(self, before: Traffic) -> Traffic:
        return Traffic(self.requests - before.requests, self.sent - before.sent, self.received - before.received)

    def copy(self) -> Traffic:
        return Traffic(Counter(self.requests), self.sent, self.received)


@final
class SlowNetwork:
    """Forwards plain HTTP to a port of this machine, all connections together no faster than the given rate."""

    def __init__(self, target: int, upload_bytes_per_second: float) -> None:
        self.target = target
        self.rate = upload_bytes_per_second
        self.traffic = Traffic()
        self.endpoint = ""
        self._free_at = 0.0
        self._connections: set[asyncio.Future[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="slow-network", daemon=True)

    def __enter__(self) -> SlowNetwork:
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._connect, "127.0.0.1", 0), self._loop
        ).result()
        self.endpoint = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def cut(self) -> None:
        """Drop every connection, with what is on its way, as the death of the machine at the other end would."""
        asyncio.run_coroutine_threadsafe(self._cut(), self._loop).result()

    async def _stop(self) -> None:
        self._server.close()
        await self._cut()

    async def _cut(self) -> None:
        connections = list(self._connections)
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _connect(self, client: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        connection = asyncio.ensure_future(self._carry(client, answer))
        self._connections.add(connection)
        # Connections end by being closed, killed or cut, and none of these is a fault of the network.
        await asyncio.gather(connection, return_exceptions=True)
        self._connections.discard(connection)
        answer.transport.abort()

    async def _carry(self, client: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        replies, server = await asyncio.open_connection("127.0.0.1", self.target)
        both = [
            asyncio.ensure_future(self._requests(client, server)),
            asyncio.ensure_future(self._responses(replies, answer)),
        ]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for direction in both:
                direction.cancel()
            await asyncio.gather(*both, return_exceptions=True)
            server.transport.abort()

    async def _requests(self, client: asyncio.StreamReader, server: asyncio.StreamWriter) -> None:
        while True:
            head = await client.readuntil(b"\r\n\r\n")
            start, *lines = head.decode("latin-1").split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            method, target, _ = start.split(" ", 2)
            self.traffic.requests[kind(method, target)] += 1
            server.write(head)
            await self._forward(client, server, int(headers.get("content-length", 0)))
            if headers.get("transfer-encoding", "").lower() == "chunked":
                while (size := int((line := await client.readline()).split(b";")[0], 16)) > 0:
                    server.write(line)
                    await self._forward(client, server, size + 2)
                while line != b"\r\n":
                    server.write(line)
                    line = await client.readline()
                server.write(line)
            await server.drain()

    async def _forward(self, client: asyncio.StreamReader, server: asyncio.StreamWriter, size: int) -> None:
        while size > 0:
            block = await client.read(min(size, CHUNK))
            if not block:
                raise ConnectionError("the client left in the middle of a body")
            size -= len(block)
            self.traffic.sent += len(block)
            now = self._loop.time()
            self._free_at = max(self._free_at, now) + len(block) / self.rate
            await asyncio.sleep(self._free_at - now)
            server.write(block)
            await server.drain()

    async def _responses(self, replies: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        while block := await replies.read(CHUNK):
            self.traffic.received += len(block)
            answer.write(block)
            await answer.drain()


def kind(method: str, target: str) -> str:
    """GET, PUT, POST, HEAD or DELETE, or LIST for a GET that lists."""
    _, _, query = target.partition("?")
    return "LIST" if method == "GET" and ("list-type" in query or "prefix" in query) else method
