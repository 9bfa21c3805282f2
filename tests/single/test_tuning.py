"""Tuning files: what is accepted, and what the errors say."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import launcher
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.core import native, tuning
from tfdist.core.rendezvous import settings_check
from tfdist.core.rendezvous.errors import RendezvousError

KNOWN = ("allreduce/ring", "allreduce/star", "broadcast/binomial", "broadcast/star")


def row(**changes):
    """A row that is right, but for the changes."""
    right = {
        "operation": "allreduce",
        "hosts": [2, 1],
        "half_types": False,
        "sizes": [
            {"up_to_bytes": 1000, "algorithm": "star"},
            {"up_to_bytes": None, "algorithm": "ring"},
        ],
    }
    return {key: value for key, value in {**right, **changes}.items() if value != ...}


def document(*rows, **changes):
    """The text of a file."""
    right = {"format": "tfdist tuning", "version": 1, "rows": list(rows)}
    return json.dumps({**right, **changes})


def sizes(*pairs):
    return [{"up_to_bytes": limit, "algorithm": name} for limit, name in pairs]


def test_lines_keep_their_order_and_say_what_they_are_for():
    text = document(
        row(),
        row(half_types=True, sizes=sizes((7, "star"))),
        row(operation="broadcast", sizes=sizes((0, "star"), (9, "binomial"))),
        measured={"host": "n1"},
    )
    found = tuning.parse(text, "t.json", KNOWN)
    assert [
        (rule.kind, rule.half, rule.hosts, rule.up_to_bytes, rule.algorithm)
        for rule in found.rules
    ] == [
        (native.ALLREDUCE, False, (2, 1), 1000, "star"),
        (native.ALLREDUCE, False, (2, 1), (1 << 63) - 1, "ring"),
        (native.ALLREDUCE, True, (2, 1), 7, "star"),
        (native.BROADCAST, False, (2, 1), 0, "star"),
        (native.BROADCAST, False, (2, 1), 9, "binomial"),
    ]
    assert found.hash == tuning.parse(text, "elsewhere.json", KNOWN).hash
    assert found.hash != tuning.parse(text + " ", "t.json", KNOWN).hash


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[" * 10000, "not JSON"),
        ("[]", "the file: expected an object, got []"),
        ("{}", "the file: 'format' is missing"),
        (document(format="other"), "format: expected 'tfdist tuning', got \"other\""),
        (document(version=2), "version: expected 1, got 2"),
        (document(extra=1), "the file: 'extra' is not known"),
        (document(rows={}), "rows: expected a list, got {}"),
        (document(3), "rows[0]: expected an object, got 3"),
        (document(row(), row()), "rows[1]: expected one row for each operation"),
        (document(row(hosts=...)), "rows[0]: 'hosts' is missing"),
        (document(row(host=1)), "rows[0]: 'host' is not known, expected operation"),
        (
            document(row(operation="sum")),
            "rows[0].operation: expected one of allreduce, allgather, broadcast, "
            'reduce_scatter, reduce, gather, scatter, alltoall; got "sum"',
        ),
        (document(row(operation=[])), "rows[0].operation: expected one of"),
        (document(row(hosts=[])), "rows[0].hosts: expected at least one host"),
        (document(row(hosts=[2, 0])), "expected 1 to 65536 ranks, got 0"),
        (document(row(hosts=[1 << 16, (1 << 16) + 1])), "got 65537"),
        (document(row(hosts=[True])), "rows[0].hosts: expected numbers of ranks"),
        (document(row(half_types=1)), "half_types: expected true or false, got 1"),
        (document(row(sizes=[])), "rows[0].sizes: expected 1 to 64 entries, got 0"),
        (document(row(sizes=sizes(*[(1, "ring")] * 65))), "1 to 64 entries, got 65"),
        (
            document(row(sizes=sizes((None, "ring"), (9, "ring")))),
            "rows[0].sizes[0].up_to_bytes: expected a number (null in the last entry)",
        ),
        (
            document(row(sizes=sizes((9, "ring"), (9, "star")))),
            "rows[0].sizes[1].up_to_bytes: expected ascending numbers",
        ),
        (document(row(sizes=sizes((-1, "ring")))), "expected ascending numbers"),
        (document(row(sizes=sizes((1 << 63, "ring")))), "expected ascending numbers"),
        (document(row(sizes=sizes((1.5, "ring")))), "expected a number"),
        (
            document(row(sizes=sizes((1, "rings")))),
            'rows[0].sizes[0].algorithm: expected one of ring, star; got "rings"',
        ),
        (document(row(sizes=sizes((1, {})))), "expected one of ring, star; got {}"),
        (" " * (tuning.MAX_BYTES + 1), "expected at most 65536 bytes"),
    ],
)
def test_what_is_wrong_is_named(text, says):
    with pytest.raises(tuning.TuningError) as caught:
        tuning.parse(text, "t.json", KNOWN)
    message = str(caught.value)
    assert message.startswith("TFDIST_TUNING_FILE=t.json: "), message
    assert says in message
    assert message.endswith("measure a new one with `tfdist bench --tune FILE`")


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["operation", "hosts", "half_types", "sizes", "rows", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=200)
@given(_values, _values)
def test_nothing_else_is_raised(rows, part):
    for text in (
        json.dumps(rows),
        document(rows),
        document(row(sizes=part, hosts=rows)),
    ):
        try:
            tuning.parse(text, "t.json", KNOWN)
        except tuning.TuningError:
            continue
        else:
            assert json.loads(text)["rows"] is not None


def test_a_file_that_cannot_be_read_is_an_error(tmp_path):
    missing = tmp_path / "no.json"
    with pytest.raises(tuning.TuningError, match="cannot be read: No such file"):
        tuning.read(str(missing))
    with pytest.raises(tuning.TuningError, match="cannot be read"):
        tuning.read(str(tmp_path))
    binary = tmp_path / "b.json"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(tuning.TuningError, match="not a text"):
        tuning.read(str(binary))
    endless = tuning.record({tuning.VARIABLE: "/dev/zero"})
    assert "at most 65536 bytes" in endless["error"]


def test_what_rank_0_tells_is_what_all_make_of_it(tmp_path):
    path = tmp_path / "t.json"
    names = [n for n in native.build_info()["algorithms"] if n.startswith("allreduce/")]
    name = names[0].partition("/")[2]
    path.write_text(document(row(sizes=sizes((5, name)))))
    told = tuning.record({tuning.VARIABLE: str(path)})
    assert tuning.from_record(told) == tuning.read(str(path))
    assert tuning.record({}) is None and tuning.record({tuning.VARIABLE: ""}) is None
    assert tuning.from_record(None) is None
    path.write_text("{}")
    with pytest.raises(tuning.TuningError, match="'format' is missing"):
        tuning.from_record(tuning.record({tuning.VARIABLE: str(path)}))


def test_a_file_of_another_rank_than_0_is_told_to_be_without_effect(caplog):
    told = {tuning.VARIABLE: "mine.json"}
    found = tuning.parse(document(row(sizes=sizes((5, "ring")))), "t.json", KNOWN)
    with caplog.at_level("INFO", logger="tfdist"):
        tuning.log(None, 3, {})
        tuning.log(found, 3, told)
        tuning.log(None, 3, told)
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("INFO", f"tuning file t.json ({found.hash})"),
        (
            "WARNING",
            "TFDIST_TUNING_FILE is set on rank 3, but not on rank 0. Only rank 0 reads "
            "it, so no tuning file is used",
        ),
    ]


def test_one_rank_alone_refuses_a_bad_file_too(tmp_path):
    path = tmp_path / "t.json"
    path.write_text("{}")
    program = "from tfdist.core import world; world.start()"
    env = {**launcher.clean_environment(), tuning.VARIABLE: str(path)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=env,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 1
    assert f"TFDIST_TUNING_FILE={path}: the file: 'format' is missing" in done.stderr


def test_the_example_of_the_page_is_a_tuning_file():
    page = Path(__file__).resolve().parents[2] / "docs" / "benchmarking.md"
    (example,) = re.findall(r"```json\n(.*?)```", page.read_text(), re.DOTALL)
    assert [r.algorithm for r in tuning.parse(example, "page").rules] == [
        "butterfly",
        "two_level",
    ]


def test_the_rendezvous_error_is_one_that_every_rank_finds_by_itself():
    records = [{"tuning": {"error": "bad"}}, {"tuning": None}]
    with pytest.raises(RendezvousError, match="bad") as caught:
        settings_check.tuning_of(records)
    # Told to the others it would reach some as another error, before they find it.
    assert caught.value.known_to_all
    assert caught.value.code == native.INVALID_ARGUMENT
    assert settings_check.tuning_of(records[::-1]) is None
