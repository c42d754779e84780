"""What a library's error says, in words that may be shown, logged and pickled: without the secrets that it may quote.

Text only: no I/O, and nothing about any service. What kind of error it is, is decided elsewhere, and never by text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

HIDDEN = "***"

_USER_INFO = re.compile(r"(?<=://)[^\s/@\"']*@")
_QUERY = re.compile(r"\?[^\s\"')]*")
_PASSWORD = re.compile(r"(?:^|::)[A-Za-z][A-Za-z0-9+.-]*://[^/\s@]*:[^/\s]*@")

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
    """Whether a URL, or one that it is chained to, carries a password before its host."""
    return _PASSWORD.search(url) is not None


def _secrets(options: Mapping[Any, Any], *, secret: bool) -> Iterator[str]:
    for name, value in options.items():
        named = secret or _SECRET_NAMES.search(str(name)) is not None
        if isinstance(value, Mapping):
            yield from _secrets(value, secret=named)
        elif named and isinstance(value, str | bytes):
            text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
            if len(text) >= _SHORTEST:
                yield text
