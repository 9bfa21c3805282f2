"""The one line by which a rank says why it ends."""

import os

import pytest

from tfdist.core.rendezvous import failure_report
from tfdist.core.rendezvous.failure_report import reason
from tfdist.core.rendezvous.placement import Placement
from tfdist.core.rendezvous.store import StoreThread

SECRET = bytes(range(32))

GRAPH = """Graph execution error:

Detected at node loss/PyFunc defined at (most recent call last):
  File "train.py", line 63, in <module>

<stack traces unavailable>
2 root error(s) found.
  (0) INVALID_ARGUMENT:  ValueError: label 11 is not a digit
Traceback (most recent call last):

  File "train.py", line 31, in check
    raise ValueError("label 11 is not a digit")

ValueError: label 11 is not a digit


\t [[{{node loss/PyFunc}}]]
\t [[gradients/split/_12]]
0 successful operations.
0 derived errors ignored. [Op:__inference_multi_step_on_iterator_413]"""

USER_CODE = """in user code:

    File "train.py", line 12, in train_step
        return self.layer(x)

    ValueError: no such axis: 3

    Arguments received by Layer.call():
      • x=tf.Tensor(shape=(8, 4), dtype=float32)
      • training=True"""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("one line"), "ValueError: one line"),
        (ValueError("first\nsecond"), "ValueError: first"),
        (ValueError("it ends in a colon:"), "ValueError: it ends in a colon:"),
        (KeyError("x"), "KeyError: 'x'"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (ValueError(), "ValueError"),
        (
            ValueError(GRAPH),
            "ValueError: Graph execution error: ValueError: label 11 is not a digit",
        ),
        (
            NotImplementedError(USER_CODE),
            "NotImplementedError: in user code: ValueError: no such axis: 3",
        ),
    ],
    ids=lambda value: str(value).partition("\n")[0][:40],
)
def test_the_line_says_what_went_wrong(error, expected):
    assert reason(error) == expected


def test_a_text_that_utf_8_cannot_encode_reaches_the_launcher(monkeypatch):
    server = StoreThread(SECRET)
    server.start()
    place = Placement(
        rank=0, size=2, launcher_runs_store=True, rendezvous=server.address
    )
    monkeypatch.setattr(failure_report, "detect", lambda environ: place)
    monkeypatch.setattr(failure_report, "read_secret_file", lambda path: SECRET)
    text = {"error": os.fsdecode(b"caf\xe9"), "blamed": None, "traceback": "\udce9"}
    try:
        assert failure_report.send({}, text) == 1
        assert failure_report.send({}, text) == 2
        (report,) = server.values(failure_report.PREFIX).values()
        assert (report["error"], report["traceback"]) == ("caf?", "?")
    finally:
        server.close()
