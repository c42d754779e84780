"""Saves of a training program: how one that fails is told."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch

from bucketpoint import BucketpointError, BucketWriter
from bucketpoint.integrations.saves import Saves
from dcp.saving.async_scenarios import GatedFileSystem


def test_ctrl_c_in_a_wait_does_not_hide_that_the_save_fails(tmp_path: Path) -> None:
    gated = GatedFileSystem()
    saves = Saves(BucketWriter(fs=gated))
    handle = saves.save(str(tmp_path / "file" / "step-1"), {"weight": torch.ones(3)})
    with mock.patch.object(handle, "result", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        saves.wait()
    (tmp_path / "file").touch()
    gated.gate.set()
    with pytest.raises(BucketpointError):
        saves.wait()
    # It is raised once.
    saves.wait()
