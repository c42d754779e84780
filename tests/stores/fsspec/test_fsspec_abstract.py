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

_LATE = "says so when the file is closed"
# adlfs 2026.8, AzureBlobFileSystem._expand_path:
_STAR = "takes a pattern that ends with a star out of the list that it makes of it, and finds nothing"
_DEEP = "passes maxdepth on to nobody: all that lies below is taken"
_BELOW = "takes just what a pattern matches, whatever recursive and maxdepth say"

OTHERWISE = {
    ("test_open_exclusive", "s3fs"): _LATE,
    ("test_open_exclusive", "gcsfs"): _LATE,
    ("test_open_exclusive", "adlfs"): _LATE,
    # s3fs looks for the name of the condition, which Amazon S3 gives and MinIO does not.
    ("test_pipe_exclusive", "s3fs"): "says so on MinIO by an OSError of another kind",
    **{
        (f"test_{way}_{name}", "adlfs"): reason
        for way in ("get", "copy")
        for name, reason in (
            ("directory_to_existing_directory", _DEEP),
            ("directory_to_new_directory", _DEEP),
            ("glob_to_existing_directory", _STAR),
            ("glob_to_new_directory", _STAR),
            ("directory_without_files_with_same_name_prefix", _STAR),
        )
    },
}
"""What the libraries do otherwise than the suite has it, and we do not depend on."""


def mark_what_goes_otherwise(request: pytest.FixtureRequest) -> None:
    """Strictly: a library that was mended fails here, and its line goes."""
    name, library = request.node.originalname, request.param
    reason = OTHERWISE.get((name, library))
    if library == "adlfs" and name in ("test_get_glob_edge_cases", "test_copy_glob_edge_cases"):
        reason = _of_a_pattern(**request.node.callspec.params)
    if reason is not None:
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))


def _of_a_pattern(path: str, recursive: bool, **_: Any) -> str | None:
    if path.endswith("*"):
        return _STAR
    # The others match folders too.
    return _BELOW if recursive and not path.startswith("fil") else None


class OnEach(AbstractFixtures):
    """The suite's fixtures, filled from ours."""

    @pytest.fixture(params=[*WITH_FOLDERS, *SERVED])
    def found(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
        mark_what_goes_otherwise(request)
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


# What adlfs says when such a file is closed, it says again when it is forgotten.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
class TestOpen(OnEach, AbstractOpenTests):
    pass


class TestPipe(OnEach, AbstractPipeTests):
    pass


class OnTrees(OnEach):
    """Where the suite's tests of whole trees apply as they are; nothing of ours moves trees."""

    @pytest.fixture(params=["memory", "file", *SERVED])
    def found(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
        mark_what_goes_otherwise(request)
        if request.param == "file":
            # Beside the suite's own local files.
            (tmp_path / "remote").mkdir()
            yield Backend("file", fsspec.filesystem("file", auto_mkdir=True), str(tmp_path / "remote"))
            return
        with backend(request.param, request, tmp_path) as one:
            if one.name in WITH_FOLDERS:
                one.fs.makedirs(one.root, exist_ok=True)
            yield one


@pytest.mark.slow
class TestGet(OnTrees, AbstractGetTests):
    pass


@pytest.mark.slow
class TestPut(OnTrees, AbstractPutTests):
    pass


@pytest.mark.slow
class TestCopy(OnTrees, AbstractCopyTests):
    pass
