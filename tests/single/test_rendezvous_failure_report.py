"""The one line by which a rank says why it ends."""

import pytest

from tfdist.core.rendezvous.failure_report import reason

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
