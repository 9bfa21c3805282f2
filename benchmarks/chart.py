"""Draws docs/images/benchmarks.svg from the committed records (`make docs`).

Each bar shows the speed of a library relative to the fastest one. Values are medians
of all rounds; of several cases of a peer the fastest one counts.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.peers import report  # noqa: E402
from benchmarks.peers.rounds import read  # noqa: E402

IMAGE = ROOT / "docs" / "images" / "benchmarks.svg"
PEERS = {  # name in the records: name and color in the picture
    "tfdist": ("tfdist", "#e07000"),
    "hvd-mpi": ("Horovod (MPI)", "#4878a8"),
    "hvd-gloo": ("Horovod (gloo)", "#85aacb"),
    "tf-ring": ("TensorFlow's ring", "#a0a0a0"),
}
BENCHMARKS = [  # title, file of records, first parts of the names of its cases
    ("allreduce of 1 MiB", "op-np2", ["allreduce/1048576"]),
    ("allreduce of 16 MiB", "op-np2", ["allreduce/16777216"]),
    ("allreduce of 256 MiB", "op-np2", ["allreduce/268435456"]),
    (
        "gradients of ResNet-50",
        "gradients-np2",
        ["buckets/", "per tensor/", "grouped/"],
    ),
    ("training a CNN", "training-np2", ["cnn/"]),
    ("training an MLP", "training-np2", ["mlp/"]),
]
WIDTH, LEFT, ROW, GAP, FULL = 760, 190, 16, 14, 420
RECT = '<rect x="{}" y="{}" width="{:.1f}" height="13" fill="{}"/>'
TEXT = '<text x="{:.1f}" y="{:.0f}" text-anchor="{}" font-size="13">{}</text>'


def values(name: str, cases: list[str]) -> dict[str, tuple[float, str]]:
    """The seconds of each library, and its value as text."""
    rows = report.latest(read(ROOT / "benchmarks/records" / f"{name}.jsonl"))[-1]
    medians = report.medians_of(report.rounds_of(rows).values())
    found = {}
    for peer in PEERS:
        # tfdist's buckets are what users get; it has `grouped`, too.
        wanted = tuple(cases[:1] if peer == "tfdist" else cases)
        own = [
            (s, c)
            for (p, c), s in medians.items()
            if p == peer and c.startswith(wanted)
        ]
        if own:
            seconds, case = min(own)
            rate = rows[0]["np"] * int(case.rpartition("/")[2]) / seconds
            is_rate = name.startswith("training")
            text = f"{rate:.0f} images/s" if is_rate else f"{1e3 * seconds:.3g} ms"
            found[peer] = seconds, text
    return found


def elements(y: int = 16) -> Iterator[str]:
    """The elements of the picture from top to bottom, then its height."""
    for number, (name, color) in enumerate(PEERS.values()):
        yield RECT.format(20 + 180 * number, y, 13, color)
        yield TEXT.format(38 + 180 * number, y + 11, "start", name)
    y += 34
    for title, name, cases in BENCHMARKS:
        found = values(name, cases)
        fastest = min(seconds for seconds, _ in found.values())
        yield TEXT.format(LEFT - 10, y + ROW * len(found) / 2 + 4, "end", title)
        for peer, (seconds, text) in found.items():
            yield RECT.format(LEFT, y, FULL * fastest / seconds, PEERS[peer][1])
            yield TEXT.format(
                LEFT + FULL * fastest / seconds + 6, y + 11, "start", text
            )
            y += ROW
        y += GAP
    yield str(y)


def render() -> str:
    """The picture as SVG."""
    *parts, height = elements()
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
    back = f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>'
    return "\n".join([f'{svg} font-family="sans-serif">', back, *parts, "</svg>\n"])


if __name__ == "__main__":
    IMAGE.write_text(render(), encoding="utf-8")
    print(f"wrote {IMAGE}")
