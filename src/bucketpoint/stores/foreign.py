"""Classification of error answers by rules, and detection of answers of a proxy, a login page or another server."""

from __future__ import annotations

import enum
import re
import ssl
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

from bucketpoint.errors import Action, EndpointError, StoreError, TransientStoreError
from bucketpoint.stores.redact import HIDDEN, clean, without_credentials

T = TypeVar("T")

ERROR_BYTES = 1 << 20
"""Limit on the body of an error: stores send a few hundred bytes."""

ANSWER_BYTES = 16 << 20
"""Limit on the body of a listing or another parsed answer: 1,000 keys of 1,024 bytes take 4 MB when escaped."""

ARCHIVED = (
    "The object is in an archive class: restore it with `aws s3api restore-object` (s3:RestoreObject) and try again, "
    "and leave checkpoints out of the lifecycle rule that archives them"
)
"""The remedy for an object that S3 has archived."""

SHOWN_BYTES = 120

_ROOT = re.compile(rb"\s*(?:<\?xml[^>]*>\s*)?(?:<!--.*?-->\s*)*<(?:[\w.-]+:)?([\w.-]+)", re.DOTALL)
_HEAD_BYTES = 4096
# A key, a token or a signature, which a page may repeat from the request.
_LONG_WORD = re.compile(r"[A-Za-z0-9+/=_~%-]{20,}")

_REMEDIES: Mapping[int, str] = {
    407: "A proxy asks for a user and a password: write them into HTTPS_PROXY, or add the store's host to NO_PROXY",
    413: (
        "A proxy before the store limits the size of a request: raise its limit (client_max_body_size of nginx), or "
        "send smaller parts with TransferOptions(part_bytes=...)"
    ),
}
_CONSOLE = "This is the port of MinIO's console. Use the port of its S3 API: 9000, unless --address names another"
_REMEDY = (
    "Check endpoint_url (its host, its port, and http or https), HTTPS_PROXY and NO_PROXY, and whether a proxy or a "
    "login page lies between this machine and the store"
)


class Asked(enum.Enum):
    """Kind of a request. A request with a condition is of the kind CONDITION, too."""

    READ = "read"
    WRITE = "write"
    DELETE = "delete"
    LIST = "list"
    CONDITION = "condition"


def asked_by(kind: str | None) -> Asked:
    """Return the kind of request (`Asked`) for a kind of `retry.KINDS`."""
    if kind in ("get", "head", "read"):
        return Asked.READ
    if kind in ("list", "list_multipart"):
        return Asked.LIST
    return Asked.DELETE if kind == "delete" else Asked.WRITE


class Operation(NamedTuple):
    """An operation of a service's API.

    Attributes:
        kind: kind of its requests, of `retry.KINDS`.
        right: permission that it needs, for messages.
        replies: possible root elements of an XML answer, or a field of each JSON answer; empty if there is neither.
        role: role in `policies/` that grants the permission.
    """

    kind: str
    right: str
    replies: tuple[str, ...] = ()
    role: str = "trainer"


class ErrorRule(NamedTuple):
    """Classification of a failure: error class, retry action, remedy."""

    kind: type[StoreError]
    action: Action
    remedy: str | None = None

    def error(self, message: str, url: str, remedy: str | None = None) -> StoreError:
        """Return the error of a failure. `remedy` takes precedence over the rule's remedy."""
        failure = self.kind(message, url=url, remedy=remedy or self.remedy)
        failure.action = self.action
        return failure


RuleKey = str | int | tuple[str | int, Asked]
"""The error code of an answer, or its HTTP status. With a kind, the rule applies only to answers to such requests."""


def rule_of(kind: type[StoreError], remedy: str | None = None, action: Action | None = None) -> ErrorRule:
    """Return a rule, with the action of its class unless `action` is given."""
    return ErrorRule(kind, kind.action if action is None else action, remedy)


def answers(
    codes: str,
    kind: type[StoreError],
    remedy: str | None = None,
    *,
    action: Action | None = None,
    asked: Asked | None = None,
) -> dict[RuleKey, ErrorRule]:
    """Return a part of a provider's table: the same rule for several answers.

    Args:
        codes: codes and HTTP statuses, separated by blanks.
        action: retry action; None for the action of the class `kind`.
        asked: the rule applies only to answers to this kind of request; None for all kinds.
    """
    names: list[str | int] = [int(code) if code.isdecimal() else code for code in codes.split()]
    rule = rule_of(kind, remedy, action)
    return {name if asked is None else (name, asked): rule for name in names}


_PROOFS = frozenset({404, 409, 412, 416})
"""Statuses that prove a missing, existing, replaced or short object, unless a code gives another cause."""


def raise_translated(
    act: Callable[[], T], kinds: tuple[type[BaseException], ...], translate: Callable[[BaseException], StoreError]
) -> T:
    """Call `act`, and raise the bucketpoint error for an exception of a client library.

    The error is raised outside the except block: the library's exception, which holds the request with its headers,
    must not become the error's `__context__`.
    """
    try:
        return act()
    except kinds as error:
        failure = translate(error)
    raise failure


def rule_for(rules: Mapping[RuleKey, ErrorRule], code: str, status: int, asked: Collection[Asked]) -> ErrorRule:
    """Return the rule for an answer. Without one, the status decides: 200 (a broken answer) and 5xx are transient."""
    known = find_rule(rules, code, status, asked)
    return known or rule_of(TransientStoreError if status >= 500 or status == 200 else StoreError)


def answer_text(operation: str, code: str, status: int, message: str) -> str:
    """Return the message for an error answer of a service."""
    text = f"{operation} failed: {code or 'no error code'} (HTTP {status})"
    return f"{text}: {message.rstrip('.')}" if message else text


def find_rule(
    rules: Mapping[RuleKey, ErrorRule], code: str, status: int | None, asked: Collection[Asked]
) -> ErrorRule | None:
    """Return the rule for an answer's code, or else for its status; None if there is no rule.

    A status in `_PROOFS` is ignored if the code is unknown: Azure answers 409 for an archived blob, and MinIO 404 for a
    missing KMS key, although the checkpoint may be complete.
    """
    for name in (code, None if code and status in _PROOFS else status):
        if not name:
            continue
        for key in (*((name, one) for one in asked), name):
            if key in rules:
                return rules[key]
    return None


class ForeignAnswer(Exception):
    """An answer that comes from something other than the store.

    Args:
        reason: reason why the answer is not the store's.
        headers: headers of the answer, by lower-case name.
        body: the beginning of the answer's body.
    """

    def __init__(self, reason: str, status: int, headers: Mapping[str, str], body: bytes = b"") -> None:
        location, server = headers.get("location"), headers.get("server", "")
        facts = [
            f"HTTP {status}",
            *(f"{name} {headers[name.lower()][:80]}" for name in _NAMED if name.lower() in headers),
        ]
        if location:
            facts.append(f"Location {without_credentials(location)[:200]}")
        if body:
            facts.append(f"beginning {_shown(body)!r}")
        super().__init__(f"the answer is not the store's, because {reason} ({', '.join(facts)})")
        if 300 <= status < 400 and location:
            self.remedy = f"The answer redirects to {without_credentials(location)[:200]}. {_REMEDY}"
        else:
            self.remedy = _CONSOLE if "console" in server.lower() else _REMEDIES.get(status, _REMEDY)

    def error(self, operation: str, url: str) -> EndpointError:
        """Return the error for the caller, which is fatal: the other server would answer every retry, too."""
        failure = EndpointError(f"{operation} failed: {self}", url=url, remedy=self.remedy)
        failure.action = Action.FATAL
        return failure


_NAMED = ("Content-Type", "Server")


def root_of(body: bytes) -> str | None:
    """Return the name of the root element of an XML document, without its namespace; None if `body` is not XML."""
    match = _ROOT.match(body[:_HEAD_BYTES].removeprefix(b"\xef\xbb\xbf"))
    return match[1].decode() if match else None


def follow(mark: str | tuple[object, ...] | None, seen: set[Hashable], operation: str, url: str) -> None:
    """Record that the next request continues at `mark`, such as the next page of a listing.

    Raises:
        StoreError: there is no mark, or it was already followed: the requests would never end.
    """
    if not mark or mark in seen:
        raise StoreError(
            f"the reply to {operation} does not name the next page, or repeats an earlier one",
            url=url,
            remedy=_REMEDY,
        )
    seen.add(mark)


def causes(error: BaseException, depth: int = 6) -> Iterator[BaseException]:
    """Yield an exception and those that libraries have wrapped in it, down to `depth` levels."""
    yield error
    inner = [getattr(error, "kwargs", {}).get("error"), getattr(error, "reason", None), *error.args, error.__cause__]
    for one in inner if depth else []:
        if isinstance(one, BaseException):
            yield from causes(one, depth - 1)


def speaks_plainly(error: BaseException) -> bool:
    """Return True if a server answered a TLS handshake without TLS: it speaks plain HTTP, for example."""
    reasons = [one.reason for one in causes(error) if isinstance(one, ssl.SSLError)]
    return any(reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG") for reason in reasons)


def read_within(blocks: Iterable[bytes], limit: int, close: Callable[[], object]) -> tuple[bytes, bool]:
    """Join the blocks of a body, up to `limit` bytes. Returns the bytes, and True if they are the whole body."""
    body = bytearray()
    for block in blocks:
        body += block
        if len(body) > limit:
            close()
            return bytes(body[:limit]), False
    return bytes(body), True


def _shown(body: bytes) -> str:
    text = " ".join(body[: 4 * SHOWN_BYTES].decode("utf-8", "replace").split())
    text = "".join(char if char.isprintable() else "?" for char in _LONG_WORD.sub(HIDDEN, clean(text)))
    return text[:SHOWN_BYTES]
