"""Writes the checkpoint that tests of other torch versions read. Run once under the torch it is named after."""

from __future__ import annotations

import shutil

import torch
import torch.distributed.checkpoint as dcp

from bucketpoint import BucketWriter
from dcp.test_compat import GOLDEN, golden_state

if __name__ == "__main__":
    target = GOLDEN / f"torch-{'.'.join(torch.__version__.split('.')[:2])}"
    shutil.rmtree(target, ignore_errors=True)
    dcp.save(golden_state(), checkpoint_id=str(target), storage_writer=BucketWriter(), no_dist=True)
