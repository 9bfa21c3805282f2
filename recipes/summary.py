"""Final report of a run: a plot of its curves, and a short table.

All data come from the run's folder. log.csv has a line per epoch, also for the epochs
before a resume (keras.callbacks.CSVLogger, append=True). It contains speed, exposed
communication and epoch times if tfdist.callbacks.Progress was before the CSVLogger in
the list of callbacks. runs.csv has the time and the epoch of the start of the run and
of each resume, recorded by `note_run`.
"""

import csv
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

PICTURE, LOG, RUNS = "curves.png", "log.csv", "runs.csv"
# Names of the accuracy; the first name that a log contains is used.
ACCURACY = (
    *("accuracy", "top_1", "categorical_accuracy", "sparse_categorical_accuracy"),
    *("binary_accuracy", "acc"),
)
LEARNING_RATE = ("learning_rate", "lr")
_TRAINING, _VALIDATION, _QUIET = "#1f6fb2", "#d9661f", "#777777"
_MARKED_UP_TO = 30  # epochs; longer curves are drawn without markers


class History(NamedTuple):
    """Logged epochs of a run, including those before a resume.

    Attributes:
        epochs: numbers from 1, ascending. If an epoch was logged twice, because it was
            interrupted or lost, the last row is used.
        columns: name → a value for each epoch, NaN if it is missing.
        resumed: where the run was resumed, in epochs: 3.5 is in the middle of epoch 4.
        seconds: total time of all rows, including repeated ones; NaN if unknown.
        left_out: the lines that could not be read, and why.
    """

    epochs: list[int]
    columns: dict[str, list[float]]
    resumed: list[float]
    seconds: float
    left_out: list[str]

    def first_of(self, names: Sequence[str], prefix: str = "") -> list[float] | None:
        """Returns the first of these columns that exists, if it has any value."""
        for name in names:
            values = self.columns.get(prefix + name, [])
            if _known(values):
                return values
        return None


def note_run(folder: Path, epoch: float, ranks: int) -> None:
    """Records in runs.csv that a run begins or continues.

    Args:
        folder: folder of the run.
        epoch: completed epochs: 3.5 in the middle of the fourth, 0 for a new run.
        ranks: number of ranks.
    """
    path = Path(folder, RUNS)
    is_new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        if is_new:
            rows.writerow(["started", "epoch", "ranks"])
        rows.writerow([time.strftime("%Y-%m-%d %H:%M:%S"), f"{epoch:.6g}", ranks])


def best(folder: Path, column: str) -> float | None:
    """Returns the largest value in a column of log.csv; None if there is none yet."""
    columns = read_history(Path(folder, LOG)).columns
    return max(_known(columns.get(column, [])), default=None)


def write_summary(
    folder: Path,
    results: Mapping[str, float] | None = None,
    skipped: Mapping[str, int] | int = 0,
    *,
    log: Path | None = None,
    unit: str = "images",
) -> str:
    """Draws curves.png and returns a table; call it on one rank, once all files exist.

    Args:
        folder: folder of the run; the plot is written to it.
        results: results of an evaluation at the end.
        skipped: number of corrupt samples that were skipped, for each part of the data.
        log: the CSV file; default: log.csv in the folder.
        unit: plural name of the samples.

    Returns:
        A text table, for printing.

    Raises:
        ValueError: the file is not a log.
    """
    folder = Path(folder)
    history = read_history(log or folder / LOG)
    if history.epochs:
        draw(history, folder / PICTURE, title=folder.resolve().name, unit=unit)
    rows = [*_rows(history, unit), *_closing_rows(folder, history, results, skipped)]
    wide = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{wide}}  {text}" for name, text in rows)


# ------------------------------------------------------------------------- reading


def read_history(path: Path) -> History:
    """Reads a CSV log, and runs.csv in the same folder.

    If a run ended in its first epoch, the log is missing or has no complete first line;
    the history then has no epochs.

    Raises:
        ValueError: the file is not a log of epochs.
    """
    path = Path(path)
    if not _has_header(path):
        return History([], {}, [], math.nan, [])
    with path.open(newline="", encoding="utf-8") as file:
        lines = csv.reader(file)
        names = next(lines, [])
        if "epoch" not in names:
            raise ValueError(
                f"Expected a CSV file with a column 'epoch', got {path} with "
                f"{', '.join(names) or 'nothing'} in its first line."
            )
        rows: dict[int, dict[str, float]] = {}
        left_out, went_back, seconds, last = [], [], [], 0
        for values in lines:
            row = dict(zip(names, map(_number, values), strict=False))
            if len(values) != len(names) or math.isnan(row["epoch"]):
                place = f"line {lines.line_num} of {path.name}"
                left_out.append(f"{place}: {len(values)} of {len(names)} values")
                continue
            epoch = int(row["epoch"]) + 1  # Keras counts from 0
            if epoch <= last:
                went_back.append(epoch - 1.0)
            last = epoch
            rows[epoch] = row
            seconds.append(row.get("epoch_s", math.nan))
    epochs = sorted(rows)
    noted = _noted(path.with_name(RUNS))
    return History(
        epochs=epochs,
        columns={n: [rows[e][n] for e in epochs] for n in names if n != "epoch"},
        resumed=sorted(set(went_back if noted is None else noted)),
        seconds=sum(_known(seconds)) if _known(seconds) else math.nan,
        left_out=left_out,
    )


def _has_header(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open(encoding="utf-8") as file:
        return file.readline().endswith("\n")


def _noted(path: Path) -> list[float] | None:
    """Returns the epochs at which runs resumed, from `note_run`; None if unknown."""
    if not path.is_file():
        return None
    with path.open(newline="", encoding="utf-8") as file:
        epochs = [_number(row.get("epoch") or "") for row in csv.DictReader(file)]
    return [epoch for epoch in _known(epochs) if epoch > 0]


def _number(text: str) -> float:
    """Returns a finite number, or NaN: Keras writes NA for unknown values."""
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan


def _known(values: Sequence[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


# ----------------------------------------------------------------------- the table


def _rows(history: History, unit: str) -> list[tuple[str, str]]:
    """Returns the rows of the summary that come from the log."""
    rows = [("epochs", _epochs(history))]
    for name, columns, prefix, sign in (
        ("validation accuracy", ACCURACY, "val_", 1),
        ("validation loss", ["loss"], "val_", -1),
        ("training accuracy", ACCURACY, "", 1),
        ("training loss", ["loss"], "", -1),
    ):
        if (values := history.first_of(columns, prefix)) is not None:
            at = _best_place(values, sign)
            text = f"{values[-1]:.4f}, best {values[at]:.4f} in epoch"
            rows.append((name, f"{text} {history.epochs[at]}"))
    if (speeds := history.first_of(["samples_per_s"])) is not None:
        known = _known(speeds)
        spread = f" ({min(known):.0f} to {max(known):.0f})" if len(known) > 1 else ""
        text = f"{statistics.median(known):.0f}{spread}, all ranks, median of epochs"
        rows.append((f"{unit}/s", text))
    if (shares := history.first_of(["exposed_communication"])) is not None:
        share = statistics.median(_known(shares))
        rows.append(("exposed communication", f"{share:.1%} of the time of a step"))
    if not math.isnan(history.seconds):
        rows.append(("time of epochs", _duration(history.seconds)))
    return rows


def _closing_rows(
    folder: Path,
    history: History,
    results: Mapping[str, float] | None,
    skipped: Mapping[str, int] | int,
) -> list[tuple[str, str]]:
    rows = []
    if results:
        shown = ", ".join(f"{name} {value:.4f}" for name, value in results.items())
        rows.append(("evaluation", shown))
    parts = skipped if isinstance(skipped, Mapping) else {"samples": skipped}
    if any(parts.values()):
        shown = ", ".join(f"{count} ({name})" for name, count in parts.items() if count)
        rows.append(("corrupt, skipped", shown))
    rows += [("not read", reason) for reason in history.left_out]
    files = sorted(p.name + "/" * p.is_dir() for p in folder.iterdir())
    return [*rows, ("files", f"{folder}: {', '.join(files)}")]


def _epochs(history: History) -> str:
    if not history.epochs:
        return "none has ended"
    text = str(history.epochs[-1])
    if len(history.epochs) != history.epochs[-1]:
        text += f", {len(history.epochs)} of them logged"
    if history.resumed:
        text += ", resumed after " + ", ".join(f"{at:.4g}" for at in history.resumed)
    return text


def _best_place(values: Sequence[float], sign: int) -> int:
    """Returns the index of the largest value times `sign`; the first if equal."""
    known = [i for i, value in enumerate(values) if not math.isnan(value)]
    return max(known, key=lambda i: sign * values[i])


def _duration(seconds: float) -> str:
    minutes, rest_s = divmod(round(seconds), 60)
    hours, rest_m = divmod(minutes, 60)
    return f"{hours} h {rest_m:02d} min" if hours else f"{minutes} min {rest_s:02d} s"


# --------------------------------------------------------------------- the picture


def draw(history: History, path: Path, *, title: str, unit: str = "images") -> None:
    """Plots loss, accuracy, learning rate and speed, if they were logged.

    Args:
        history: with at least one epoch.
        path: path of the PNG file.
        title: title of the plot.
        unit: plural name of the samples.
    """
    known = history.first_of
    panels = [
        ("loss", known(["loss"]), known(["loss"], "val_")),
        ("accuracy (top-1)", known(ACCURACY), known(ACCURACY, "val_")),
        ("learning rate", known(LEARNING_RATE), None),
        (f"{unit}/s, all ranks", known(["samples_per_s"]), None),
    ]
    panels = [panel for panel in panels if panel[1:] != (None, None)]
    columns = 1 if len(panels) < 2 else 2
    lines = max(1, math.ceil(len(panels) / columns))
    figure = Figure(figsize=(5.4 * columns, 2.9 * lines + 0.7), dpi=120)
    FigureCanvasAgg(figure)
    handles = {}
    for number, (name, training, validation) in enumerate(panels):
        axes = figure.add_subplot(lines, columns, number + 1)
        axes.set_title(name, loc="left", fontsize=11)
        handles |= _panel(axes, history, training, validation)
        if number >= len(panels) - columns:
            axes.set_xlabel("epoch")
        if name.startswith("accuracy"):
            axes.yaxis.set_major_formatter(FuncFormatter(_percent))
            if validation is not None:
                _mark_best(axes, history.epochs, validation)
        elif name == "learning rate":
            _log_scale_where_wide(axes, training or [])
        elif name != "loss":
            axes.set_ylim(0, 1.15 * max(_known(training or [])))
    if not panels:
        figure.text(0.5, 0.5, "The log has no numbers to draw.", ha="center")
    top = 0.25 / figure.get_figheight()  # a quarter of an inch
    figure.text(0.012, 1 - top, title, va="center", fontsize=12, fontweight="bold")
    if len(handles) > 1:
        figure.legend(
            handles.values(),
            handles.keys(),
            loc="center right",
            bbox_to_anchor=(1.0, 1 - top),
            ncols=3,
            frameon=False,
        )
    figure.tight_layout(rect=(0, 0, 1, 1 - 2 * top))
    figure.savefig(path)


def _panel(
    axes: Axes,
    history: History,
    training: Sequence[float] | None,
    validation: Sequence[float] | None,
) -> dict[str, object]:
    """Draws the curves of one quantity; returns the entries for the legend."""
    first, last = history.epochs[0] - 1, history.epochs[-1]
    axes.set_xlim(first, max(last, first + 2))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    handles: dict[str, object] = {}
    for name, values, color in (
        ("training", training, _TRAINING),
        ("validation", validation, _VALIDATION),
    ):
        if values is None:
            continue
        [handles[name]] = axes.plot(
            history.epochs,
            values,
            color=color,
            linewidth=1.6,
            marker="o" if len(history.epochs) <= _MARKED_UP_TO else "",
            markersize=4,
            clip_on=False,
        )
    for at in history.resumed:
        line = axes.axvline(at, color=_QUIET, linestyle=(0, (3, 2)), linewidth=1.1)
        handles["resumed"] = line
    return handles


def _mark_best(axes: Axes, epochs: Sequence[int], values: Sequence[float]) -> None:
    at = _best_place(values, 1)
    axes.plot(
        epochs[at], values[at], "o", color=_VALIDATION, markersize=6, clip_on=False
    )
    axes.annotate(
        f"best {values[at]:.2%}, epoch {epochs[at]}",
        (epochs[at], values[at]),
        xytext=(0, 8),
        textcoords="offset points",
        ha="right" if at > len(epochs) / 2 else "left",
        color=_VALIDATION,
        fontsize=9,
    )
    axes.margins(y=0.15)


def _percent(value: float, _: object) -> str:
    return f"{round(100 * value, 6):g}%"


def _log_scale_where_wide(axes: Axes, values: Sequence[float]) -> None:
    positive = [value for value in _known(values) if value > 0]
    if positive and max(positive) > 50 * min(positive):
        axes.set_yscale("log")
