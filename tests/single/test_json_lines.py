"""Lines of processes that were killed while they wrote."""

import pytest
from helpers.json_lines import complete, lines


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("", []),
        ('{"a": 1}\n{"a": {"b": 2}}\n', [{"a": 1}, {"a": {"b": 2}}]),
        ('{"a": 1}\n{"a": 2, "b', [{"a": 1}]),
        ('{"a": 1}\n{"a": 2, "b{"a": 3}\n{"a": 4}\n', [{"a": 1}, {"a": 3}, {"a": 4}]),
        ('{"a": 1, \n{"a": 2}\n', [{"a": 2}]),
    ],
)
def test_complete_lines_are_found(text, rows):
    assert complete(text) == rows


def test_a_file_that_is_not_there_has_none(tmp_path):
    assert lines(tmp_path / "none") == []
