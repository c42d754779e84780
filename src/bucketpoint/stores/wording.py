"""What a library's error says, in words that may be shown, logged and pickled: without the secrets that it may quote.

Text only: no I/O, and nothing about any service. What kind of error it is, is decided elsewhere, and never by text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

HIDDEN = "***"

# The user and the password before a host. A password may hold a slash, though it should be quoted, or an "@"; with a
# slash it is told from a host and its port by what stands before the slash.
_USER_INFO = re.compile(r"(?<=://)(?:(?!arn:)[^\s/@\"':]*:(?!\d*/)[^\s\"']*|[^\s/\"']*)@")
_QUERY = re.compile(r"\?[^\s\"')]*")
_BEGINNING = re.compile(r"(?:^\s*|::)([A-Za-z][A-Za-z0-9+.-]*)://")
_HOST_AND_PORT = re.compile(r"[^:@]*:\d*|\[[^@\]]*\](?::\d*)?", re.DOTALL)

_WITHOUT_PORTS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl"})
"""Schemes of buckets: where a colon stands before the first slash, no port follows."""

# Names of options, as filesystems of all services have them: secret, password, account_key, sas_token, credential, …
_SECRET_NAMES = re.compile(r"key|secret|token|pass|cred|sas|auth|signature|connection_string", re.IGNORECASE)
_SHORTEST = 6
"""Shorter values are found everywhere in a text, and are nobody's secret."""


def clean(text: str) -> str:
    """Without the parts of URLs that hold credentials: a user's name and password, and a query with a signature."""
    return _QUERY.sub("", _USER_INFO.sub("", text))


def describe(error: BaseException, options: Mapping[str, Any] | None = None) -> str:
    """An error's type and text, cleaned, and without the secrets among the options that its library was given."""
    # The text of a connection's error names the URL of the request or of the proxy: with the name and password that
    # somebody put there, and with the query, in which a signature may stand. A header is in none of them.
    return hide(clean(f"{type(error).__name__}: {error}"), options or {})


def hide(text: str, options: Mapping[str, Any]) -> str:
    """The text without the values of those options whose names say that they are secret."""
    for value in sorted(_secrets(options, secret=False), key=len, reverse=True):
        for form in (value, quote(value, safe="")):
            text = text.replace(form, HIDDEN)
    return text


def holds_password(url: str) -> bool:
    """Tell whether a URL, or one that it is chained to, carries a password before its host, slashes in it or not."""
    return any(_has_password(*part) for part in _parts(url))


def without_password(url: str) -> str:
    """Cut what stands before the last "@" of a URL that holds a password, and of each that it is chained to."""
    shown = [scheme + "://" + rest.rpartition("@")[2] for scheme, rest in _parts(url)]
    return "::".join(shown).partition("?")[0]


def _parts(url: str) -> Iterator[tuple[str, str]]:
    """The URLs that are chained to each other, each as its scheme and the rest."""
    found = list(_BEGINNING.finditer(url))
    for number, match in enumerate(found, 1):
        yield match[1], url[match.end() : found[number].start() if number < len(found) else None]


def _has_password(scheme: str, rest: str) -> bool:
    first = rest.partition("/")[0]
    if "@" in first:
        return ":" in first.rpartition("@")[0] or (":" in first and "@" in rest[len(first) :])
    if ":" not in first or "@" not in rest or first.startswith("arn:"):
        return False
    return scheme.lower() in _WITHOUT_PORTS or _HOST_AND_PORT.fullmatch(first) is None


def _secrets(options: Mapping[Any, Any], *, secret: bool) -> Iterator[str]:
    for name, value in options.items():
        named = secret or _SECRET_NAMES.search(str(name)) is not None
        if isinstance(value, Mapping):
            yield from _secrets(value, secret=named)
        elif named and isinstance(value, str | bytes):
            text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
            if len(text) >= _SHORTEST:
                yield text
