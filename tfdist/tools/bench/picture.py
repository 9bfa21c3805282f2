"""Plots the times of all algorithms against size, with crossovers."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.tools.bench import output
from tfdist.tools.bench.tune import Choice, Times

MISSING = "it needs matplotlib, which is not installed: pip install matplotlib"


def is_possible() -> bool:
    """Returns whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def kinds() -> list[str]:
    """Returns the supported picture formats: png, svg, pdf and others."""
    from matplotlib.figure import Figure

    return sorted(Figure().canvas.get_supported_filetypes())


def kind(path: Path) -> str:
    """Returns the format of a picture, from the suffix of its name."""
    return path.suffix.removeprefix(".").lower()


def draw(
    path: Path,
    title: str,
    series: Mapping[tuple[str, str], Times],
    choices: Mapping[tuple[str, str], Choice],
) -> None:
    """Writes a picture with a panel for each operation and type.

    Args:
        path: path of the picture; its suffix is one of `kinds`.
        title: title of the picture.
        series: the measured times for each pair of operation and type.
        choices: the chosen algorithms for each pair, for the crossovers; may be empty.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.5 * len(series)), layout="constrained")
    figure.suptitle(title)
    panels: Sequence[Any] = figure.subplots(len(series), 1, squeeze=False)[:, 0]
    for panel, (key, times) in zip(panels, series.items(), strict=True):
        _draw_one(panel, " ".join(key), times, choices.get(key))
    with output.atomic_write(path) as part:
        figure.savefig(part, dpi=120, format=kind(path))


def _draw_one(panel: Any, title: str, times: Times, choice: Choice | None) -> None:
    axes = panel
    for name, measured in sorted(times.items()):
        sizes = sorted(measured)
        seconds = [measured[size] * 1e6 for size in sizes]
        axes.plot(sizes, seconds, marker="o", markersize=3, label=name)
    for limit, name in choice.sizes if choice else ():
        if limit is not None:
            axes.axvline(limit, color="grey", linestyle=":")
            across = axes.get_xaxis_transform()  # x in bytes, y as fraction of panel
            axes.text(limit, 0.02, name, rotation=90, fontsize=7, transform=across)
    axes.set(title=title, xscale="log", yscale="log")
    axes.set(xlabel="bytes", ylabel="microseconds")
    axes.legend(fontsize=7)
    axes.grid(True, which="both", alpha=0.2)
