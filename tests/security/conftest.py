"""What is logged while a test runs."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Everything that anybody logs below `bucketpoint`, and what the root logger gets from us."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger = logging.getLogger("bucketpoint")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield stream
    logger.removeHandler(handler)
    logger.setLevel(before)
