"""docs/callbacks.md says something true about every callback there is."""

import re
from pathlib import Path

import keras

import tfdist

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "callbacks.md").read_text(encoding="utf-8")
TESTS = "\n".join(
    path.read_text(encoding="utf-8")
    for folder in ("parallel", "faults")
    for pattern in (
        *("test_callbacks_*.py", "test_batch_norm_*.py", "test_uneven_*.py"),
        "test_progress.py",
    )
    for path in sorted((ROOT / "tests" / folder).glob(pattern))
)
# The base, the container, and what needs a package that is not installed.
NO_ROW = {"Callback", "CallbackList", "OrbaxCheckpoint"}


def rows():
    """The names in the table, with the words of their rows."""
    section = PAGE.split("## Each callback")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", section, re.MULTILINE))


def test_every_callback_of_keras_and_tfdist_has_a_row_in_order():
    of_keras = {name for name in vars(keras.callbacks) if name[0].isupper()}
    assert set(rows()) == (of_keras | set(tfdist.callbacks.__all__)) - NO_ROW
    assert list(rows()) == sorted(rows())


def test_every_callback_of_the_table_is_used_on_several_ranks_by_a_test():
    used = set(re.findall(r"\b(\w+)\(", TESTS))
    assert set(rows()) - used == set()


def test_the_list_of_the_page_is_in_the_order_that_is_accepted():
    block = re.search(r"```python\ncallbacks = \[\n(.+?)\n\]", PAGE, re.DOTALL)
    names = re.findall(r"callbacks\.(\w+)\((?!keras)", block[1])
    assert names[:3] == ["UnevenData", "BroadcastInitialState", "MetricAverage"]
    assert names[-1] == "StopTogether"
    assert set(names) <= set(rows())
