"""docs/horovod-names.md is that of the signatures, and has no empty cell."""

import keras
import pytest
from helpers import horovod_page


def test_the_page_is_current_and_no_cell_is_empty():
    text = horovod_page.render()  # raises where a cell is empty
    current = horovod_page.PAGE.read_text(encoding="utf-8")
    if f"Keras {keras.__version__}." not in current:
        pytest.skip("the page was made with another version of Keras")
    assert current == text, "run: make docs"


def test_an_empty_cell_is_an_error():
    for row in (("", "effect", "test"), ("name", "", "test"), ("name", "effect", "")):
        with pytest.raises(ValueError, match="empty cell"):
            horovod_page._lines([row], ".")


def test_names_of_equal_effect_share_a_row():
    rows = [("losses.a", "write `x.a`", "t"), ("losses.b", "write `x.b`", "t")]
    expected = "| `losses.a`, `losses.b` | write `x.<name>` | `t` |\n"
    assert horovod_page._lines(rows, ".") == expected


def test_the_tests_of_the_page_exist():
    tests = horovod_page.PAGE.parents[1] / "tests"
    known = {path.stem for path in tests.rglob("test_*.py")}
    rows = horovod_page.PAGE.read_text(encoding="utf-8").splitlines()
    named = {row.rpartition("| `")[2].split("`")[0] for row in rows if row[:3] == "| `"}
    assert named and named <= known
