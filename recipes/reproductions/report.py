"""The report of the reproductions: one HTML page with embedded plots."""

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
        "<p>The tables have the values at the end of a run, for example after the last "
        "epoch: means of all seeds, with 95&nbsp;% confidence intervals (Student's t). "
        "In these runs, one process simulates all ranks; a part of each study is "
        "repeated with real ranks.</p>",
        *(_section(study, result) for study, result in results),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _section(study: Study, result: Result) -> str:
    rows = [
        (name, str(len(result.curves[name])), str(found))
        for name, found in last_of(result.curves).items()
    ]
    for name, number in (result.on_ranks or {}).items():
        rows.append((f"{study.ranks} real ranks: {name}", "1", f"{number:.4g}"))
    checks = [
        f"<tr class='{'holds' if check.holds else 'fails'}'><td>{_text(check.text)}"
        f"</td><td>{_text(check.found)}</td>"
        f"<td>{'holds' if check.holds else 'does not hold'}</td></tr>"
        for check in checks_of(study, result)
    ]
    return "\n".join(
        [
            f"<h2>{_text(study.title)}</h2><p>{_text(study.claim)}</p>",
            f"<p>Source: {_text(study.source)}. Workload: {_text(study.workload)}. "
            f"Hash of the code: {code_hash(study)}.</p>",
            f"<table><tr><th></th><th>seeds</th><th>{_text(study.values)}</th></tr>",
            *(
                f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>"
                for row in rows
            ),
            "</table><table><tr><th>criterion</th><th>found</th><th></th></tr>",
            *checks,
            f"</table><img alt='{_text(study.values)} by {_text(study.order)}' "
            f"src='{_picture(study, result.curves)}'>",
        ]
    )


def _picture(study: Study, curves: Curves) -> str:
    """Returns a picture of the values in their order, as a data URL."""
    figure, axes = plt.subplots(figsize=(7, 3.5))
    for name, seeds in curves.items():
        found = [interval(values) for values in zip(*seeds, strict=True)]
        places = range(1, len(found) + 1)
        low = [one.mean - (one.half or 0) for one in found]
        high = [one.mean + (one.half or 0) for one in found]
        marker = "o" if len(found) == 1 else ""
        axes.plot(places, [one.mean for one in found], marker=marker, label=name)
        axes.fill_between(places, low, high, alpha=0.2)
    axes.set(xlabel=study.order, ylabel=study.values)
    if study.ticks is not None:
        axes.set_xticks(range(1, len(study.ticks) + 1), study.ticks)
    if study.values.endswith("%"):
        axes.set(ylim=(0, 100))
    axes.legend()
    figure.tight_layout()
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=120)
    plt.close(figure)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _text(text: str) -> str:
    return html.escape(text)
