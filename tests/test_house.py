"""The lint of the house rules finds names of tests that break them."""

from pathlib import Path

import check_house


def test_refuses_names_of_tests_that_begin_without_a_verb_are_long_or_used_twice(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(f"def test_a_save(): ...\ndef test_{'k' * 80}(): ...\ndef test_a_save(): ...\n")
    (tmp_path / "tiers.py").write_text('{\n    "test_gone": (),\n}\n')
    assert len(list(check_house.names_of_tests(tmp_path))) == 5
