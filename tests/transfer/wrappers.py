"""Stores around a store, for tests: one that counts and records calls, one that fails where it is told to."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bucketpoint.errors import TransientStoreError


def wrap_stores(patch: Any, make: Callable[[Any], Any], *, once: bool = False) -> list[Any]:
    """Put `make(store)` around every store that writers and readers open from now on, or around the first, which all
    get. Return the list to which each is added.
    """
    from bucketpoint.dcp import session

    made: list[Any] = []
    original = session.open_store

    def opened(*args: Any, **kwargs: Any) -> tuple[Any, str]:
        store, prefix = original(*args, **kwargs)
        if not (once and made):
            made.append(make(store))
        return made[-1], prefix

    patch.setattr(session, "open_store", opened)
    return made


class CountingStore:
    """Passes every call on and counts it by name; bytes of bodies are counted too."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.calls: Counter[str] = Counter()
        self.keys: set[str] = set()
        self.sent = 0
        self.received = 0
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.inner, name)
        if not callable(value):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self.calls[name] += 1
                self.keys.update(args[:1] if args and isinstance(args[0], str) else ())
                if name == "put":
                    self.sent += sum(len(view) for view in args[1])
                if name == "put_part":
                    self.sent += sum(len(view) for view in args[3])
                if name == "read_into":
                    self.received += sum(len(view) for view in args[2])
                if name == "open_range":
                    self.received += args[2]
            return value(*args, **kwargs)

        return call


class FailingStore(CountingStore):
    """Raises `error` instead of making the calls that `when(name, number)` picks; calls of a name count from 1."""

    def __init__(self, inner: Any, when: Callable[[str, int], bool], error: Callable[[], BaseException]) -> None:
        super().__init__(inner)
        self._when = when
        self._error = error
        self._numbers: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        passed = super().__getattr__(name)
        if not callable(passed):
            return passed

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self._numbers[name] += 1
                fails = self._when(name, self._numbers[name])
            if fails:
                raise self._error()
            return passed(*args, **kwargs)

        return call


class StreamingStore(CountingStore):
    """Replies to ranged reads piece by piece, as S3 and GCS do, whatever the store below."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.replies: list[StreamedReply] = []

    @property
    def capabilities(self) -> Any:
        return replace(self.inner.capabilities, streams_ranges=True)

    def open_range(self, key: str, offset: int, nbytes: int, *, if_match: str | None = None) -> StreamedReply:
        data = bytearray(nbytes)
        self.inner.read_into(key, offset, [memoryview(data)], if_match=if_match)
        reply = StreamedReply(key, offset, memoryview(data))
        with self._lock:
            self.calls["open_range"] += 1
            self.received += nbytes
            self.replies.append(reply)
        return reply


class StreamedReply:
    """A reply of a `StreamingStore`. It breaks off once `breaks_at` bytes have been received."""

    def __init__(self, key: str, start: int, data: memoryview) -> None:
        self.key = key
        self.start = start
        self.data = data
        self.done = 0
        self.breaks_at: int | None = None
        self.dropped = False

    def receive(self, buffers: Any) -> None:
        assert not self.dropped
        for view in buffers:
            if self.breaks_at is not None and self.done + len(view) > self.breaks_at:
                raise TransientStoreError("the body broke off")
            assert self.done + len(view) <= len(self.data)
            view[:] = self.data[self.done : self.done + len(view)]
            self.done += len(view)

    def drop(self) -> None:
        self.dropped = self.done < len(self.data)
