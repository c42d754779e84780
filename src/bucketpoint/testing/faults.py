"""The script of a run: which requests meet which fault. Pure: a seed and a count decide, no clock and no chance.

A fault is something that stores and networks do. Rules pick requests by kind, by key, and by number or probability; of
several rules the first one that strikes counts.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from bucketpoint.testing.kinds import BODIES_UP, READS, Api, Request

# -- faults ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """Base of all. What the proxy does to one request, or to its answer."""

    @property
    def name(self) -> str:
        return type(self).__name__

    def fits(self, request: Request) -> bool:
        """Whether it can happen to this request at all."""
        return True


@dataclass(frozen=True)
class Refuse(Fault):
    """An error in the words of the API that is asked. With `acted` the store has done what it was asked, and only its
    answer is lost."""

    status: int = 503
    code: str = "SlowDown"
    acted: bool = False

    @property
    def name(self) -> str:
        return f"{self.status} {self.code}{' after the store acted' if self.acted else ''}"


@dataclass(frozen=True)
class Reset(Fault):
    """The connection is reset. With `acted` the store has done what it was asked."""

    acted: bool = False

    @property
    def name(self) -> str:
        return "reset after the store acted" if self.acted else "reset"


@dataclass(frozen=True)
class Stall(Fault):
    """Nothing for so many seconds, and then a reset."""

    seconds: float = 5.0
    acted: bool = False

    @property
    def name(self) -> str:
        return "stall after the store acted" if self.acted else "stall"


@dataclass(frozen=True)
class Delay(Fault):
    """The request waits for so many seconds, and then goes on."""

    seconds: float = 0.2

    @property
    def name(self) -> str:
        return "delay"


@dataclass(frozen=True)
class Slow(Fault):
    """Bodies pass at so many bytes a second."""

    bytes_per_s: float = 1e6

    @property
    def name(self) -> str:
        return "slow"


@dataclass(frozen=True)
class CutRequest(Fault):
    """The store gets only this fraction of the body, and then a reset, as does the client."""

    at: float = 0.5

    @property
    def name(self) -> str:
        return "request cut short"

    def fits(self, request: Request) -> bool:
        return request.nbytes > 0


@dataclass(frozen=True)
class CutReply(Fault):
    """The client gets only this fraction of the body, under the full length."""

    at: float = 0.5

    @property
    def name(self) -> str:
        return "reply cut short"

    def fits(self, request: Request) -> bool:
        return request.kind == "GetObject"


@dataclass(frozen=True)
class FlipRequest(Fault):
    """One bit of the body changes on its way to the store: that at this fraction of it."""

    at: float = 0.5

    @property
    def name(self) -> str:
        return "bit flipped on the way up"

    def fits(self, request: Request) -> bool:
        return request.kind in BODIES_UP and request.nbytes > 0


@dataclass(frozen=True)
class FlipReply(Fault):
    """One bit of the body changes on its way to the client."""

    at: float = 0.5

    @property
    def name(self) -> str:
        return "bit flipped on the way down"

    def fits(self, request: Request) -> bool:
        return request.kind == "GetObject"


@dataclass(frozen=True)
class ErrorInBody(Fault):
    """CompleteMultipartUpload answers 200 and then an error in the body, as S3 may.

    https://docs.aws.amazon.com/AmazonS3/latest/API/API_CompleteMultipartUpload.html
    """

    code: str = "InternalError"
    acted: bool = False

    @property
    def name(self) -> str:
        return "200 with an error in its body"

    def fits(self, request: Request) -> bool:
        return request.kind == "CompleteMultipartUpload" and request.api is not Api.GCS_JSON


@dataclass(frozen=True)
class Stale(Fault):
    """The answer that the proxy saw first to the same read, as a cache that nobody invalidates would give."""

    @property
    def name(self) -> str:
        return "stale"

    def fits(self, request: Request) -> bool:
        return request.kind in READS


@dataclass(frozen=True)
class SkewClock(Fault):
    """The store's clock, in the Date of its replies, is so many seconds ahead. Beyond 15 minutes it refuses requests.

    https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html: RequestTimeTooSkewed.
    """

    seconds: float = 3600.0

    LARGEST_S = 900.0

    @property
    def name(self) -> str:
        return "clock skewed"


@dataclass(frozen=True)
class ExpireCredentials(Fault):
    """From this request on, whatever is signed with the same access key, or has the same token, is refused: by S3 with
    ExpiredToken, by GCS with 401."""

    @property
    def name(self) -> str:
        return "credentials expired"


@dataclass(frozen=True)
class Kill(Fault):
    """SIGKILL to these process groups, and nothing passes any more until another script is played.

    With `acted` the store has done what it was asked: the death is after the request and before its answer. With
    `others_live` there are clients besides, whose requests go on passing.
    """

    groups: tuple[int, ...]
    acted: bool = True
    others_live: bool = False

    @property
    def name(self) -> str:
        return "kill"


# -- rules -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """Which requests meet one of these faults.

    Attributes:
        faults: one of them strikes, of those that fit the request: the seed decides which.
        kinds: operations; empty for all.
        keys: a pattern for the object's key, as in `fnmatch`.
        probability: of striking a request that fits.
        skip: how many requests that fit go by first.
        times: how many are struck at most; None for any number.
    """

    faults: tuple[Fault, ...]
    kinds: tuple[str, ...] = ()
    keys: str = "*"
    probability: float = 1.0
    skip: int = 0
    times: int | None = None

    def fits(self, request: Request) -> bool:
        if self.kinds and request.kind not in self.kinds:
            return False
        return fnmatchcase(request.key, self.keys) and any(fault.fits(request) for fault in self.faults)


@dataclass(frozen=True)
class Script:
    """Rules and a seed. The n-th request that fits a rule meets the same fate in every run."""

    rules: tuple[Rule, ...] = ()
    seed: int = 0


def always(
    *faults: Fault, kinds: Sequence[str] = (), keys: str = "*", skip: int = 0, times: int | None = None
) -> Script:
    """A script of one rule without chance."""
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
"""What passes if it is tried again, and what a save and a load are to survive."""


def mixed(probability: float, *, seed: int = 0, faults: Sequence[Fault] = TRANSIENT) -> Script:
    """Each request meets one of these with this probability."""
    return Script((Rule(tuple(faults), probability=probability),), seed)


class Player:
    """A script being played: counts what has gone by. Safe to ask from several threads."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self._lock = threading.Lock()
        self._seen: Counter[int] = Counter()
        self._struck: Counter[int] = Counter()

    def choose(self, request: Request) -> Fault | None:
        """The fault that this request meets."""
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

    def remembers(self, request: Request) -> bool:
        """Whether a later request for the same may be answered with what this one gets."""
        return any(
            isinstance(fault, Stale) and rule.fits(request) for rule in self.script.rules for fault in rule.faults
        )
