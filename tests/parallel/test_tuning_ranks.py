"""Tuning files and algorithms by request, on ranks without TensorFlow."""

import json
import sys

import pytest
from helpers import launcher

from tfdist.core import tuning

# Each rank of 2: reads TUNING_<rank>, starts, sums 100 floats; prints what it chose.
PROGRAM = """
import os, sys
import numpy as np
rank = os.environ["TFDIST_RANK"]
os.environ["TFDIST_TUNING_FILE"] = os.environ["TUNING_" + rank]
from tfdist.core import native, runtime, world
from helpers import core_client
try:
    world.start(timeout_s=20)
except native.CoreError as error:
    print("refused", error.code, error.message)
    sys.exit(3)
chosen = [native.algorithm(native.ALLREDUCE, 1, size) for size in (400, 401, 9 << 20)]
total = core_client.allreduce(np.full(100, 1 + int(rank), np.float32), name="x")
assert total[99] == 3.0
print("chose", *chosen, native.counters()["tuning"])
"""


def text(*pairs):
    sizes = [{"up_to_bytes": limit, "algorithm": name} for limit, name in pairs]
    row = {
        "operation": "allreduce",
        "hosts": [2],
        "half_types": False,
        "sizes": sizes,
    }
    return json.dumps({"format": "tfdist tuning", "version": 1, "rows": [row]})


def run(tmp_path, *texts, program=PROGRAM):
    """The program on two ranks; `texts`: of the files of rank 0 and 1, None: unset."""
    env = {}
    for rank, content in enumerate(texts):
        path = tmp_path / f"t{rank}.json"
        if content is not None:
            path.write_text(content)
        env[f"TUNING_{rank}"] = "" if content is None else str(path)
    return launcher.run(
        tmp_path, "-np", "2", sys.executable, "-c", program, timeout_s=60, **env
    )


def said(done, word):
    """What each rank said after a word, by rank."""
    lines = sorted(line for line in done.stdout.splitlines() if f"] {word} " in line)
    return [line.split(f"] {word} ")[1] for line in lines]


def test_rank_0s_file_counts_on_all_ranks(tmp_path):
    first = text((400, "star"), (1 << 20, "tree"), (None, "ring"))
    second = text((None, "butterfly"))
    known = tuning.parse(first, "t0.json")
    done = run(tmp_path, first, second)
    assert done.code == 0, done.stdout + done.stderr
    assert said(done, "chose") == [f"star tree ring {known.hash}"] * 2


def test_without_a_file_on_rank_0_nothing_is_tuned_and_that_is_said(tmp_path):
    done = run(tmp_path, None, text((None, "butterfly")))
    assert done.code == 0, done.stdout + done.stderr
    assert said(done, "chose") == ["one_shot one_shot pairwise "] * 2
    assert "TFDIST_TUNING_FILE is set on rank 1, but not on rank 0" in done.stderr


@pytest.mark.parametrize(
    ("content", "says"),
    [
        pytest.param(
            '{"format": "tfdist tuning"}',
            "the file: 'version' is missing",
            marks=pytest.mark.slow,
        ),
        (text((None, "no such")), "expected one of ring, pairwise, "),
    ],
)
def test_a_bad_file_is_the_same_error_on_every_rank(tmp_path, content, says):
    done = run(tmp_path, content, None)
    assert done.code == 3
    told = said(done, "refused")
    assert len(told) == 2 and told[0] == told[1]
    assert told[0].startswith(f"3 TFDIST_TUNING_FILE={tmp_path}/t0.json: ")
    assert says in told[0]


def test_ranks_that_name_different_algorithms_all_get_a_mismatch(tmp_path):
    program = """
import os
import numpy as np
from tfdist.core import native, runtime, world
from tfdist.tools.bench.calls import Call
from tfdist.tools.bench.operations import DTYPES, OPERATIONS
world.start(timeout_s=20)
x, y = np.ones(8, np.float32), np.zeros(8, np.float32)
def ask(name, algorithm):
    call = Call(OPERATIONS["allreduce"], DTYPES["float32"], x, y, name=name,
                algorithm=algorithm)
    call.run()
    call.run()  # a predicted one
try:
    ask("same", "tree")
    assert y[7] == 2.0
    ask("other", "tree" if runtime.rank() == 1 else "")
except native.CoreError as error:
    print("refused", error.payload["kind"], error.message)
"""
    done = run(tmp_path, None, None, program=program)
    assert done.code == 0, done.stdout + done.stderr
    assert (
        said(done, "refused")
        == [
            'mismatch "other": the ranks do not agree on the algorithm: rank 0: the '
            "configured one; rank 1: tree. Ask for one algorithm on every rank."
        ]
        * 2
    )
