"""Types of options: numbers of bytes, and lengths of time."""

from __future__ import annotations

import re
from typing import Any

import click

from bucketpoint.errors import PolicyError

_POWERS = "KMGT"


class ByteCount(click.ParamType):  # type: ignore[type-arg, unused-ignore]  # generic from click 8.2 on
    """A number of bytes: `5GB` and `500MB` count in powers of 1000, `128MiB` and `1G` in powers of 1024."""

    name = "size"

    def __init__(self, *, least: int = 0) -> None:
        self._least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"([0-9]+)\s*(?:([KMGT])(I?B)?|B)?", str(value).strip().upper())
        if match is None or int(match[1]) < self._least:
            self.fail(f"{value!r} is not a size: write 5GB, 128MiB or a number of bytes", param, ctx)
        base = 1000 if match[3] == "B" else 1024
        return int(match[1]) * (base ** (_POWERS.index(match[2]) + 1) if match[2] else 1)


class Age(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """A duration as policies write it: `20m`, `48h`, `7d`. Converted to seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from bucketpoint.retention.setting_types import Duration

        if isinstance(value, float):
            return value
        try:
            return Duration(zero=True).check(str(value)).total_seconds()
        except PolicyError:
            self.fail(f"{value!r} is not a duration: write 20m, 48h or 7d", param, ctx)
