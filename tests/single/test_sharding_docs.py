"""docs/sharding-a-pipeline.md: its lines run, and give what the page says."""

import re

import numpy as np
from helpers.pages import DOCS, run_page

import tfdist


def test_on_one_rank_before_and_after_give_the_same_samples():
    names = run_page("sharding-a-pipeline.md")
    for before, after in (
        ("single", "sharded"),
        ("single_cached", "sharded_cached"),
        ("loaded", "train"),
        ("loaded_validation", "validation"),
        ("single_windows", "windows"),
        ("single_pictures", "pictures"),
    ):
        sizes = [
            [len(x) for x, _ in names[name].as_numpy_iterator()]
            for name in (before, after)
        ]
        assert sizes[0] == sizes[1], before
        labels = [
            sorted(np.concatenate([y for _, y in names[name].as_numpy_iterator()]))
            for name in (before, after)
        ]
        assert labels[0] == labels[1], before
    for index in range(len(names["single_squares"])):
        x, y = names["squares"][index]
        assert x.tolist() == names["single_squares"][index][0].tolist()
        assert y.tolist() == (x**2).tolist()
    assert len(names["squares"]) == 6
    tfdist.shutdown()


def test_the_table_links_every_section():
    text = (DOCS / "sharding-a-pipeline.md").read_text(encoding="utf-8")
    linked = re.findall(r"\(#([\w-]+)\)", text)
    titles = re.findall(r"^## (.+)$", text, re.MULTILINE)
    names = [re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles]
    assert linked == names
