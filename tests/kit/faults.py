"""The script of a run: faults, and rules for the requests that meet them. A seed and counts decide, no clock or chance.

A fault is an event that happens with real stores and networks. Rules pick requests by kind, by key, and by number or
probability. If several rules fit, the first one that strikes counts.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar

from kit.kinds import BODIES_UP, READS, Api, StoreRequest

# -- faults ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """Base class: an action of the proxy on one request, or on the answer to it."""

    label: ClassVar[str]
    only: ClassVar[frozenset[str]] = frozenset()
    """Kinds of requests to which the fault can happen; empty for all."""

    @property
    def name(self) -> str:
        """Name of the fault in counts."""
        return self.label

    def fits(self, request: StoreRequest) -> bool:
        """Return True if this fault can happen to the request at all."""
        return not self.only or request.kind in self.only


@dataclass(frozen=True)
class Refuse(Fault):
    """An error in the format of the API that the client uses.

    Attributes:
        status: HTTP status of the answer.
        code: code of the error, as the store spells it.
        acted: the store has carried out the request, and only the answer is lost.
    """

    status: int = 503
    code: str = "SlowDown"
    acted: bool = False

    @property
    def name(self) -> str:
        return f"{self.status} {self.code}{' after the store acted' if self.acted else ''}"


@dataclass(frozen=True)
class Reset(Fault):
    """The connection is reset. With `acted` the store has carried out the request."""

    acted: bool = False

    @property
    def name(self) -> str:
        return "reset after the store acted" if self.acted else "reset"


@dataclass(frozen=True)
class Stall(Fault):
    """Silence, and then a reset. With `acted` the store has carried out the request."""

    seconds: float = 5.0
    acted: bool = False

    @property
    def name(self) -> str:
        return "stall after the store acted" if self.acted else "stall"


@dataclass(frozen=True)
class Delay(Fault):
    """A pause before the request continues."""

    seconds: float = 0.2

    label = "delay"


@dataclass(frozen=True)
class Slow(Fault):
    """A limit on the speed of bodies."""

    bytes_per_s: float = 1e6

    label = "slow"


@dataclass(frozen=True)
class CutRequest(Fault):
    """The store gets only a part of the body. Then both the store and the client get a reset.

    Attributes:
        at: the fraction of the body that the store gets, between 0 and 1.
    """

    at: float = 0.5

    label = "request cut short"

    def fits(self, request: StoreRequest) -> bool:
        return request.nbytes > 0


@dataclass(frozen=True)
class CutReply(Fault):
    """The client gets only a part of the body, under a head with the full length.

    Attributes:
        at: the fraction of the body that the client gets, between 0 and 1.
    """

    at: float = 0.5

    label = "reply cut short"
    only = frozenset({"GetObject"})


@dataclass(frozen=True)
class FlipRequest(Fault):
    """One bit of the body changes on the way to the store: the lowest bit of one byte.

    Attributes:
        at: the place of the byte, as a fraction of the body, between 0 and 1.
    """

    at: float = 0.5

    label = "bit flipped on the way up"
    only = BODIES_UP

    def fits(self, request: StoreRequest) -> bool:
        return super().fits(request) and request.nbytes > 0


@dataclass(frozen=True)
class FlipReply(Fault):
    """One bit of the body changes on the way to the client.

    Attributes:
        at: the place of the byte, as a fraction of the body, between 0 and 1.
    """

    at: float = 0.5

    label = "bit flipped on the way down"
    only = frozenset({"GetObject"})


@dataclass(frozen=True)
class ErrorInBody(Fault):
    """CompleteMultipartUpload answers 200 and then an error in the body, as S3 may.

    https://docs.aws.amazon.com/AmazonS3/latest/API/API_CompleteMultipartUpload.html

    Attributes:
        code: code of the error, as the store spells it.
        acted: the store has carried out the request.
    """

    code: str = "InternalError"
    acted: bool = False

    label = "200 with an error in its body"

    def fits(self, request: StoreRequest) -> bool:
        return request.kind == "CompleteMultipartUpload" and request.api is not Api.GCS_JSON


@dataclass(frozen=True)
class Stale(Fault):
    """The first answer that the proxy saw to the same read, as from a cache that is never invalidated."""

    label = "stale"
    only = READS


@dataclass(frozen=True)
class ExpireCredentials(Fault):
    """From this request on, all requests with the same access key or token are refused.

    The refusal is ExpiredToken for S3, and 401 for GCS.
    """

    label = "credentials expired"


@dataclass(frozen=True)
class Kill(Fault):
    """SIGKILL to process groups. Afterwards nothing passes until another script is played.

    Attributes:
        groups: ids of the process groups.
        acted: the store has carried out the request: the processes die after the request and before the answer.
        others_live: there are other clients as well, whose requests continue to pass.
    """

    groups: tuple[int, ...]
    acted: bool = True
    others_live: bool = False

    label = "kill"


# -- rules -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """Selection of requests, and the faults that they meet.

    Attributes:
        faults: the seed decides which of them strikes, among those that fit the request.
        kinds: operations; empty for all.
        keys: a pattern for the object's key, as in `fnmatch`.
        probability: of striking a request that fits.
        skip: number of requests that fit and pass before the first strike.
        times: most requests to strike; None for any number.
    """

    faults: tuple[Fault, ...]
    kinds: tuple[str, ...] = ()
    keys: str = "*"
    probability: float = 1.0
    skip: int = 0
    times: int | None = None

    def fits(self, request: StoreRequest) -> bool:
        """Return True if the rule speaks of the request, and one of its faults can happen to it."""
        if self.kinds and request.kind not in self.kinds:
            return False
        return fnmatchcase(request.key, self.keys) and any(fault.fits(request) for fault in self.faults)


@dataclass(frozen=True)
class Script:
    """Rules and a seed. The n-th request that fits a rule is treated the same in every run.

    Attributes:
        rules: the rules, of which the first one that strikes counts.
        seed: seed of the draws.
    """

    rules: tuple[Rule, ...] = ()
    seed: int = 0


def always(
    *faults: Fault, kinds: Sequence[str] = (), keys: str = "*", skip: int = 0, times: int | None = None
) -> Script:
    """Make a script of one rule that always strikes, with the attributes of `Rule`."""
    return Script((Rule(tuple(faults), tuple(kinds), keys, skip=skip, times=times),))


TRANSIENT: tuple[Fault, ...] = (
    Refuse(500, "InternalError"),
    Refuse(502, "BadGateway"),
    Refuse(503, "SlowDown"),
    Refuse(429, "TooManyRequests"),
    Refuse(500, "InternalError", acted=True),
    Reset(),
    Reset(acted=True),
    CutRequest(),
    CutReply(),
    Delay(),
    ErrorInBody(),
)
"""Faults that disappear on a retry. Saves and loads have to survive them."""


def mixed(probability: float, *, seed: int = 0, faults: Sequence[Fault] = TRANSIENT) -> Script:
    """Make a script in which each request meets one of several faults with the same probability, between 0 and 1."""
    return Script((Rule(tuple(faults), probability=probability),), seed)


class Player:
    """A script in play: counts the requests so far. Safe to use from several threads."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self._lock = threading.Lock()
        self._seen: Counter[int] = Counter()
        self._struck: Counter[int] = Counter()

    def choose(self, request: StoreRequest) -> Fault | None:
        """Return the fault that this request meets, or None."""
        with self._lock:
            for number, rule in enumerate(self.script.rules):
                if not rule.fits(request):
                    continue
                self._seen[number] += 1
                if self._seen[number] <= rule.skip or (rule.times is not None and self._struck[number] >= rule.times):
                    continue
                chance = random.Random(f"{self.script.seed}/{number}/{self._seen[number]}")
                if chance.random() < rule.probability:
                    self._struck[number] += 1
                    return chance.choice([fault for fault in rule.faults if fault.fits(request)])
        return None

    def remembers(self, request: StoreRequest) -> bool:
        """Return True if the answer to this request may be needed later as a stale answer."""
        return any(
            isinstance(fault, Stale) and rule.fits(request) for rule in self.script.rules for fault in rule.faults
        )
