"""fsspec's own abstract test suite, on each filesystem that the documentation names.

It tests the libraries and their servers and none of our code: what we build on is what it says it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.tests.abstract import (
    AbstractCopyTests,
    AbstractFixtures,
    AbstractGetTests,
    AbstractOpenTests,
    AbstractPipeTests,
    AbstractPutTests,
)

from fsspec_backends import SERVED, Backend, backend

WITH_FOLDERS = ("memory", "file", "dir")

OTHERWISE = {
    **{("test_open_exclusive", name): "says so when the file is closed" for name in ("s3fs", "gcsfs", "adlfs")},
    # s3fs looks for the name of the condition, which Amazon S3 gives and MinIO does not.
    ("test_pipe_exclusive", "s3fs"): "says so on MinIO by an OSError of another kind",
}
"""What the libraries do otherwise than the suite has it, and we do not depend on."""


class OnEach(AbstractFixtures):
    """The suite's fixtures, filled from ours."""

    @pytest.fixture(params=[*WITH_FOLDERS, *SERVED])
    def found(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
        reason = OTHERWISE.get((request.node.originalname, request.param))
        if reason is not None:
            request.applymarker(pytest.mark.xfail(reason=reason))
        with backend(request.param, request, tmp_path) as one:
            if one.name in WITH_FOLDERS:
                one.fs.makedirs(one.root, exist_ok=True)
            yield one

    @pytest.fixture
    def fs(self, found: Backend) -> Any:
        return found.fs

    @pytest.fixture
    def fs_path(self, found: Backend) -> str:
        return found.root

    @pytest.fixture
    def fs_join(self) -> Callable[..., str]:
        return lambda *parts: "/".join(parts)

    @pytest.fixture
    def supports_empty_directories(self, found: Backend) -> bool:
        return found.name in WITH_FOLDERS


class TestOpen(OnEach, AbstractOpenTests):
    pass


class TestPipe(OnEach, AbstractPipeTests):
    pass


class OnFolders(OnEach):
    """Where the suite's tests of whole trees apply as they are; nothing of ours moves trees."""

    @pytest.fixture(params=["memory", "file"])
    def found(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
        if request.param == "memory":
            with backend("memory", request, tmp_path) as one:
                one.fs.makedirs(one.root, exist_ok=True)
                yield one
        else:
            # Beside the suite's own local files.
            (tmp_path / "remote").mkdir()
            yield Backend("file", fsspec.filesystem("file", auto_mkdir=True), str(tmp_path / "remote"))


@pytest.mark.slow
class TestGet(OnFolders, AbstractGetTests):
    pass


@pytest.mark.slow
class TestPut(OnFolders, AbstractPutTests):
    pass


@pytest.mark.slow
class TestCopy(OnFolders, AbstractCopyTests):
    pass
