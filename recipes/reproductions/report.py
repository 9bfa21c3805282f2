"""The report of the reproductions: one HTML page that contains its pictures."""

import base64
import html
import io
from collections.abc import Sequence

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from study import Curves, Result, Study, checks_of, code_hash, interval, last_of

STYLE = """
body { font-family: sans-serif; max-width: 52em; margin: 2em auto; line-height: 1.4 }
table { border-collapse: collapse; margin: 1em 0 }
td, th { border: 1px solid #bbb; padding: 0.3em 0.7em; text-align: left }
.holds { background: #dfd } .fails { background: #fdd } img { max-width: 100% }
"""


def page(results: Sequence[tuple[Study, Result]]) -> str:
    """Returns the whole page."""
    parts = [
        "<!DOCTYPE html><html lang='en'><head><meta charset='utf-8'>",
        f"<title>tfdist: reproductions</title><style>{STYLE}</style></head><body>",
        "<h1>Published claims about large batches, reproduced</h1>",
        "<p>Accuracies are percentages of the test digits after the last epoch: means "
        "of all seeds, with 95&nbsp;% confidence intervals (Student's t). Ranks are "
        "simulated in one process; one training of each study is repeated with real "
        "ranks.</p>",
        *(_section(study, result) for study, result in results),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _section(study: Study, result: Result) -> str:
    rows = [
        (label, len(result.curves[label]), found)
        for label, found in last_of(result.curves).items()
    ]
    if result.on_ranks is not None:
        rows.append(
            (f"{study.confirmed}, real ranks", 1, interval(result.on_ranks[-1:]))
        )
    checks = [
        f"<tr class='{'holds' if holds else 'fails'}'><td>{_text(text)}</td>"
        f"<td>{_text(found)}</td><td>{'holds' if holds else 'does not hold'}</td></tr>"
        for text, found, holds in checks_of(study, result)
    ]
    return "\n".join(
        [
            f"<h2>{_text(study.title)}</h2><p>{_text(study.claim)}</p>",
            f"<p>Source: {_text(study.source)}. Workload: {_text(study.workload)}. "
            f"Hash of the code: {code_hash(study)}.</p>",
            "<table><tr><th>training</th><th>seeds</th><th>accuracy, %</th></tr>",
            *(
                f"<tr><td>{_text(label)}</td><td>{count}</td><td>{found}</td></tr>"
                for label, count, found in rows
            ),
            "</table><table><tr><th>mark</th><th>found</th><th></th></tr>",
            *checks,
            f"</table><img alt='accuracy by epoch' src='{_picture(result.curves)}'>",
        ]
    )


def _picture(curves: Curves) -> str:
    """Returns a picture of the accuracies by epoch, as a data URL."""
    figure, axes = plt.subplots(figsize=(7, 3.5))
    for label, seeds in curves.items():
        found = [interval(values) for values in zip(*seeds, strict=True)]
        epochs = range(1, len(found) + 1)
        means = [100 * one.mean for one in found]
        halves = [100 * (one.half or 0) for one in found]
        axes.plot(epochs, means, label=label)
        axes.fill_between(
            epochs,
            [max(m - h, 0) for m, h in zip(means, halves, strict=True)],
            [min(m + h, 100) for m, h in zip(means, halves, strict=True)],
            alpha=0.2,
        )
    axes.set(xlabel="epoch", ylabel="test accuracy, %", ylim=(0, 100))
    axes.legend(loc="lower right")
    figure.tight_layout()
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=120)
    plt.close(figure)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _text(text: str) -> str:
    return html.escape(text)
