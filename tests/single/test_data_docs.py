"""docs/data.md: its lines run."""

from helpers.pages import run_page

import tfdist


def test_all_lines_of_the_page_run():
    names = run_page("data.md")
    assert len(names["batches"]) == 3
    seen = [sample for step in names["steps"] for sample in step]
    assert len(set(seen)) == 100
    tfdist.shutdown()
