"""The picture of the README shows the committed records."""

import xml.etree.ElementTree as ET

from helpers.tree import ROOT

from benchmarks import chart


def test_the_committed_picture_is_current():
    text = chart.IMAGE.read_text(encoding="utf-8")
    assert text == chart.render(), "run: make docs"
    ET.fromstring(text)


def test_every_bar_fits_and_the_fastest_is_the_longest():
    root = ET.fromstring(chart.render())
    bars = [
        rect
        for rect in root.iter("{http://www.w3.org/2000/svg}rect")
        if rect.get("x") == str(chart.LEFT)
    ]
    assert len(bars) == sum(len(chart.values(n, c)) for _, n, c in chart.BENCHMARKS)
    widths = [float(bar.get("width")) for bar in bars]
    assert max(widths) == chart.FULL and min(widths) > 0
    assert widths.count(chart.FULL) == len(chart.BENCHMARKS)


def test_the_readme_shows_it_with_a_description():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "](docs/images/benchmarks.svg)" in text
    assert "![](" not in text
