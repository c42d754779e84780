"""Plain values of a state of Ray Train's workers: they are restored as they were reported, empty dicts included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import bucketpoint
from bucketpoint import MismatchError
from bucketpoint.integrations.ray import _load_plain, _noted_empty_dicts


@pytest.mark.parametrize(
    "expected", [{"val": {}}, {"train": {"1": 0.5}, "val": {}}, {"a": {2: {"b": {}}}, "c": []}, {}]
)
@pytest.mark.parametrize("here", [{}, {"val": {}}, {"train": {"1": 0.0}, "val": {"1": 0.0}}])
def test_restores_empty_dicts_whatever_the_state_has_before(expected: Any, here: Any, tmp_path: Path) -> None:
    state = {"losses": expected, "loss": 1.0}
    bucketpoint.save({**state, **_noted_empty_dicts(state)}, tmp_path)
    assert _load_plain({"losses": here, "loss": None}, str(tmp_path), None) == state


def test_restores_a_checkpoint_without_a_note_of_empty_dicts(tmp_path: Path) -> None:
    bucketpoint.save({"losses": {"train": {"1": 0.5}, "val": {}}, "never": {"val": {}}}, tmp_path)
    here: dict[str, Any] = {"losses": {}, "never": {"val": {}}}
    expected = {"losses": {"train": {"1": 0.5}}, "never": {"val": {}}}
    assert _load_plain(here, str(tmp_path), None) == expected
    with pytest.raises(MismatchError, match="missing"):
        _load_plain({"missing": None}, str(tmp_path), None)


def test_saves_a_state_without_empty_dicts_as_it_is() -> None:
    assert _noted_empty_dicts({"losses": {"train": {"1": 0.5}}, "history": [], "epoch": 0}) == {}
