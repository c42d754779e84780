"""Removal of secrets from the error texts of libraries, so that the texts can be shown, logged and pickled."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

HIDDEN = "***"

# The user and the password before a host. A password may contain "@", or a slash that should have been quoted. A
# password with a slash is distinguished from a host and port by the text before the slash: a port is digits only.
_USER_INFO = re.compile(r"(?<=://)(?:(?!arn:)[^\s/@\"':]*:(?!\d*/)[^\s\"']*|[^\s/\"']*)@")
_QUERY = re.compile(r"\?[^\s\"')]*")
# http.client and requests quote a header that they refuse, which may be a token with a line break.
_HEADER = re.compile(r"(header (?:value|part)\b)(?: .*|[^ ].*)", re.IGNORECASE | re.DOTALL)
_BEGINNING = re.compile(r"(?:^\s*|::)([A-Za-z][A-Za-z0-9+.-]*)://")
_HOST_AND_PORT = re.compile(r"[^:@]*:\d*|\[[^@\]]*\](?::\d*)?", re.DOTALL)

_WITHOUT_PORTS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl"})
"""Schemes whose URLs name a bucket, not a host: a colon before the first slash is not followed by a port."""

# Names of secret options of fsspec filesystems: secret, password, account_key, sas_token, credential, …
_SECRET_NAMES = re.compile(r"key|secret|token|pass|cred|sas|auth|signature|connection_string", re.IGNORECASE)
_SHORTEST = 6
"""Length of the shortest value that is hidden: shorter values occur by chance in any text, and are not secrets."""

_CONTAINERS = ("abfs://", "abfss://", "az://", "adl://", "wasb://", "wasbs://")
"""Beginnings of URLs in which the name before the "@" is that of a container: `abfs://container@account/path`."""


def clean(text: str) -> str:
    """Remove parts that may hold credentials: user and password of URLs, the query (signatures), headers."""
    return _QUERY.sub("", _USER_INFO.sub("", _HEADER.sub(rf"\1 {HIDDEN}", text)))


def describe(error: BaseException, options: Mapping[str, Any] | None = None) -> str:
    """Return the type and text of an error, without URL credentials and the secrets in the library's `options`."""
    # The text of a connection error quotes the URL of the request or of the proxy, with user name and password if it
    # has them, and with the query, which may hold a signature.
    return hide(clean(f"{type(error).__name__}: {error}"), options or {})


def hide(text: str, options: Mapping[str, Any]) -> str:
    """Hide, in a text, the values of options whose names suggest a secret."""
    for value in sorted(_secrets(options, secret=False), key=len, reverse=True):
        for form in (value, quote(value, safe="")):
            text = text.replace(form, HIDDEN)
    return text


def holds_password(url: str) -> bool:
    """Return True if a URL, or one chained to it, has a password before the host, even one with slashes."""
    return any(_with_passwords(url))


def without_password(url: str) -> str:
    """Return the scheme of the first URL with a password, and the text after the last "@", without the query."""
    return f"{next(_with_passwords(url))}://{url.rpartition('@')[2]}".partition("?")[0]


def without_credentials(url: str) -> str:
    """Remove from a URL the user, the password and the query, but not the name of a container."""
    if holds_password(url):
        return without_password(url)
    return url.partition("?")[0] if url.startswith(_CONTAINERS) else clean(url)


def _with_passwords(url: str) -> Iterator[str]:
    """Yield the scheme of each URL of a chain (`a://…::b://…`) that has a password. A password may contain `://`."""
    for match in _BEGINNING.finditer(url):
        following = _BEGINNING.search(url, match.end())
        part = url[match.end() : following.start() if following else None]
        if _has_password(match[1], part.partition("/")[0], url[match.end() :]):
            yield match[1]


def _has_password(scheme: str, first: str, rest: str) -> bool:
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
