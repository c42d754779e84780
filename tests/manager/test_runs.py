"""Whose run it is: jobs that save to one root, of one run or of several."""

from __future__ import annotations

import pytest

from bucketpoint.catalog.save_log import name_run
from bucketpoint.errors import OtherRunError
from bucketpoint.manager.manager import CheckpointManager
from manager.agree_scenarios import committed
from manager.manager_scenarios import policy, state
from manager.test_manager import save

pytestmark = pytest.mark.contract


def test_continues_a_named_run_after_a_crash_and_tells_others(root: str) -> None:
    target = state(0)
    for step in (10, 20):
        with CheckpointManager(root, policy=policy(run="a")) as manager:
            restored = manager.restore(target, fresh=True)
            assert (restored.step if restored else None) == (10 if step == 20 else None)
            manager.save(step, state(step))
    for other in ("b", None):
        with CheckpointManager(root, policy=policy(run=other)) as manager:
            # To begin from scratch is no way in.
            for fresh in (False, True):
                with pytest.raises(OtherRunError, match="The checkpoints at this URL belong to run 'a'"):
                    manager.restore(target, fresh=fresh)
            with pytest.raises(OtherRunError, match="set run: a in the policy"):
                manager.save(30, state(30))
            with pytest.raises(OtherRunError):
                manager.prune()
    assert committed(root) == ["step-10", "step-20"]


def test_keeps_a_run_that_began_without_a_name_from_named_ones_until_told(root: str) -> None:
    save(root, 10)
    target = state(0)
    with CheckpointManager(root, policy=policy(run="a")) as manager:
        with pytest.raises(OtherRunError, match=f"bucketpoint gc {root} --name a"):
            manager.restore(target)
        with pytest.raises(OtherRunError, match="a run that has no name"):
            manager.save(20, state(20))
        assert name_run(manager.catalog, "a") == "a"
        assert name_run(manager.catalog, "b") == "a"
        assert manager.restore(target).step == 10  # type: ignore[union-attr]
        manager.save(20, state(20))
    assert committed(root) == ["step-10", "step-20"]
