"""HOROVOD_* variables: what each becomes, and what is said about the others. Pure."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.core import native
from tfdist.launch.horovod import variables
from tfdist.launch.horovod.variables import STATE, VariableError, translate, update


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("FUSION_THRESHOLD", "1048576", {"TFDIST_FUSION_BYTES": "1048576"}),
        ("FUSION_THRESHOLD", "0", {"TFDIST_FUSION_BYTES": "0"}),
        ("FUSION_THRESHOLD", str(1 << 40), {"TFDIST_FUSION_BYTES": str(4 << 30)}),
        ("STALL_CHECK_TIME_SECONDS", "90", {"TFDIST_STALL_WARNING_S": "90"}),
        ("STALL_CHECK_TIME_SECONDS", "0", {"TFDIST_STALL_WARNING_S": "86400"}),
        ("STALL_CHECK_DISABLE", "1", {"TFDIST_STALL_WARNING_S": "86400"}),
        ("STALL_CHECK_DISABLE", "0", {}),
        ("STALL_SHUTDOWN_TIME_SECONDS", "60", {"TFDIST_TIMEOUT_S": "60"}),
        ("START_TIMEOUT", "45", {"TFDIST_START_TIMEOUT_S": "45"}),
        ("TIMELINE", "/tmp/t.json", {"TFDIST_TIMELINE": "/tmp/t.json.d"}),
        ("TIMELINE", "DYNAMIC", {}),
        ("LOG_LEVEL", "TRACE", {"TFDIST_LOG_LEVEL": "debug"}),
        ("LOG_LEVEL", "fatal", {"TFDIST_LOG_LEVEL": "error"}),
        ("GLOO_IFACE", "eth1", {"TFDIST_ADDRESS": "eth1"}),
        (
            "HIERARCHICAL_ALLREDUCE",
            "1",
            {"TFDIST_ALLREDUCE_ALGORITHM": "two_level"},
        ),
        ("TORUS_ALLREDUCE", "1", {"TFDIST_ALLREDUCE_ALGORITHM": "torus"}),
        ("TORUS_ALLREDUCE", "0", {}),
        ("RANK", "3", {}),
        ("DYNAMIC_PROCESS_SETS", "1", {}),
    ],
)
def test_what_has_a_meaning_is_translated(name, text, expected):
    found = translate({f"HOROVOD_{name}": text, "HOME": "/root"})
    assert found.settings == expected
    places = [f"into the folder {path}" for path in expected.values()]
    assert len(found.notes) == (1 if expected and name == "TIMELINE" else 0)
    assert all(note.endswith(places[0]) for note in found.notes)


@pytest.mark.parametrize("name", [n for n, m in variables.TABLE.items() if m.note])
def test_what_has_no_meaning_is_named_with_what_is_used_instead(name):
    (note,) = translate({f"HOROVOD_{name}": "3"}).notes
    assert note.startswith(f"HOROVOD_{name} has no effect: ")
    assert len(note) > len(f"HOROVOD_{name} has no effect: ") + 10
    assert translate({f"HOROVOD_{name}": "0"}).notes == []  # off, as it is here


@pytest.mark.parametrize("name", ["NCCL_HOME", "WITH_TENSORFLOW", "GPU_OPERATIONS"])
def test_variables_of_the_build_are_named_as_such(name):
    assert "building Horovod" in translate({f"HOROVOD_{name}": "x"}).notes[0]


def test_a_misspelled_variable_is_named():
    (note,) = translate({"HOROVOD_FUSION_TRESHOLD": "1"}).notes
    assert "HOROVOD_FUSION_TRESHOLD" in note and "no such variable" in note


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("FUSION_THRESHOLD", "64MB", "expected a number of bytes"),
        ("FUSION_THRESHOLD", "-1", "expected a number of bytes"),
        ("FUSION_THRESHOLD", "nan", "expected a number of bytes"),
        ("LOG_LEVEL", "loud", "expected one of trace, debug"),
        ("START_TIMEOUT", "soon", "expected a number of seconds"),
    ],
)
def test_a_value_that_means_nothing_is_an_error(name, text, says):
    with pytest.raises(VariableError, match=says) as caught:
        translate({f"HOROVOD_{name}": text})
    assert f"HOROVOD_{name}='{text}'" in str(caught.value)


def test_variables_that_contradict_each_other():
    both = {"HOROVOD_TORUS_ALLREDUCE": "1", "HOROVOD_HIERARCHICAL_ALLREDUCE": "1"}
    with pytest.raises(VariableError, match="name different algorithms"):
        translate(both)
    off = {"HOROVOD_STALL_CHECK_DISABLE": "1", "HOROVOD_STALL_CHECK_TIME_SECONDS": "9"}
    assert translate(off).settings == {"TFDIST_STALL_WARNING_S": "86400"}
    environ = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0", "HOROVOD_TIMELINE": "t"}
    never = translate(environ)
    assert never.settings == {"TFDIST_TIMELINE": "t.d"}
    assert "in tfdist every wait ends" in never.notes[0]


def test_a_variable_of_tfdist_wins_over_that_of_horovod():
    environ = {"HOROVOD_LOG_LEVEL": "debug", "TFDIST_LOG_LEVEL": "error"}
    assert update(environ).settings == {}


def test_a_rank_is_told_what_is_new_and_nothing_twice():
    environ = {"HOROVOD_LOG_LEVEL": "debug", "HOROVOD_CYCLE_TIME": "2"}
    first = update(environ)
    assert first.settings == {"TFDIST_LOG_LEVEL": "debug"} and len(first.notes) == 1
    environ |= first.settings | {STATE: first.state}
    again = update(environ)
    assert (again.settings, again.notes) == ({}, [])
    # The program sets variables itself: also one that the launcher has translated.
    environ |= {"HOROVOD_LOG_LEVEL": "info", "HOROVOD_FUSION_THRESHOLD": "0"}
    later = update(environ)
    assert later.settings == {"TFDIST_LOG_LEVEL": "info", "TFDIST_FUSION_BYTES": "0"}
    assert later.notes == []


def after(found, environ):
    """The environment after an update."""
    kept = {k: v for k, v in environ.items() if k not in found.removed}
    return kept | found.settings | {STATE: found.state}


@pytest.mark.parametrize(
    ("name", "value", "changed"),
    [
        ("TORUS_ALLREDUCE", "1", "0"),
        ("STALL_CHECK_DISABLE", "1", None),
        ("TIMELINE", "t", "DYNAMIC"),
    ],
)
def test_a_variable_that_the_program_turns_off_has_no_effect(name, value, changed):
    environ = {f"HOROVOD_{name}": value}
    environ = after(update(environ), environ)
    (becomes,) = [k for k in environ if k.startswith("TFDIST_")]
    del environ[f"HOROVOD_{name}"]
    if changed:
        environ[f"HOROVOD_{name}"] = changed
    off = update(environ)
    assert (off.settings, off.removed, off.notes) == ({}, [becomes], [])
    again = update(after(off, environ))
    assert (again.settings, again.removed) == ({}, [])
    # The program has set the variable of tfdist itself.
    assert update(environ | {becomes: "own"}).removed == []


def test_a_changed_variable_is_translated_together_with_those_of_the_launcher():
    environ = {"HOROVOD_STALL_CHECK_DISABLE": "1", "HOROVOD_TORUS_ALLREDUCE": "1"}
    environ = after(update(environ), environ)
    assert update(environ | {"HOROVOD_STALL_CHECK_TIME_SECONDS": "9"}).settings == {}
    with pytest.raises(VariableError, match="name different algorithms"):
        update(environ | {"HOROVOD_HIERARCHICAL_ALLREDUCE": "1"})
    own = update(environ | {"TFDIST_STALL_WARNING_S": "5"})
    assert (own.settings, own.removed) == ({}, [])


@settings(max_examples=60)
@given(st.sampled_from(sorted(variables.TABLE)), st.floats(0, 1e7) | st.integers(0, 99))
def test_whatever_comes_out_is_a_variable_of_tfdist_with_a_value_it_takes(name, value):
    text = "debug" if name == "LOG_LEVEL" else f"{value:g}"
    found = translate({f"HOROVOD_{name}": text}).settings
    assert set(found) <= set(native.config())
    with pytest.MonkeyPatch.context() as patch:
        for becomes, translated in found.items():
            patch.setenv(becomes, translated)
        native.config()  # raises what it does not take
