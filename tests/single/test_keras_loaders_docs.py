"""docs/keras-loaders.md: its lines run, and give what the page says."""

import re

import numpy as np
from helpers.pages import DOCS, run_page

import tfdist


def test_all_lines_of_the_page_run():
    names = run_page("keras-loaders.md")
    assert [len(images) for images, _ in names["train"]] == [4, 4, 4, 4]
    assert sum(len(images) for images, _ in names["validation"]) == 4
    first = np.concatenate([x[:, 0] for x, _ in names["windows"].as_numpy_iterator()])
    assert sorted(first) == list(range(91))
    assert (
        sum(int(sum(dogs)) for _, dogs in names["pictures"].as_numpy_iterator()) == 10
    )
    numbers = [n for batch in range(6) for n in names["squares"][batch][0]]
    assert numbers == list(range(22)) and len(names["squares"]) == 6
    tfdist.shutdown()


def test_the_table_links_every_section():
    text = (DOCS / "keras-loaders.md").read_text(encoding="utf-8")
    linked = re.findall(r"\(#([\w-]+)\)", text)
    titles = re.findall(r"^## (.+)$", text, re.MULTILINE)
    names = [re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles]
    assert linked == names
