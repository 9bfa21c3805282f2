"""The table of Horovod's interface, against the signatures of tfdist.horovod."""

import importlib

import pytest
from helpers import horovod_interface as interface
from helpers import horovod_reading
from helpers.horovod_calls import is_default

import tfdist.horovod.tensorflow as hvd


def differences(rows):
    """What of the signatures is not as the rows say."""
    wrong = []
    for row, text in rows.items():
        try:
            found = horovod_reading.parameters(interface.find(row), "tfdist.horovod")
        except (AttributeError, ImportError) as error:
            found = f"missing: {error}"
        if found != text:
            wrong.append(f"{row}: {found!r} for {text!r}")
    return wrong


@pytest.mark.parametrize("module", interface.HOROVOD)
def test_parameters_and_defaults_are_those_of_horovod(module):
    rows = {
        row: text
        for row, text in interface.rows().items()
        if row.partition(":")[0] == module
    }
    assert differences(rows) == []


def test_the_comparison_sees_other_names_other_defaults_and_what_is_missing():
    assert not differences({"tensorflow:size_op": "process_set_id=0, name=None"})
    for text in (
        *("process_set=0, name=None", "process_set_id=1, name=None"),
        *("process_set_id=0", "process_set_id, name=None", "process_set_id=0, *name"),
    ):
        assert differences({"tensorflow:size_op": text})
    assert differences({"tensorflow:nothing": ""})


def test_a_value_that_says_what_the_default_says_is_not_given():
    words = [hvd.Average, None]
    # Other objects than the defaults, as those in a test's file are.
    one, text = float("1.0"), "".join(["ab", "c"])
    for value, default in ((one, 1.0), (int(one), 1.0), (text, "abc"), (0, 0)):
        assert is_default(value, default), value
    assert is_default(words, words) and is_default(None, None)
    for value, default in ((2.0, 1.0), (0, None), ("", None), ([], []), (1, words)):
        assert not is_default(value, default)


def test_constants_are_horovods_numbers():
    for row, value in interface.constants().items():
        assert int(interface.find(row)) == int(value)
    assert hvd.Compression.none and hvd.Compression.fp16
    for module in ("tensorflow", "tensorflow.mpi_ops", "tensorflow.keras", "keras"):
        found = importlib.import_module(f"tfdist.horovod.{module}")
        assert found.global_process_set is hvd.global_process_set
        assert all(hasattr(found, name) for name in found.__all__)


def test_what_is_left_out_or_different_is_horovods_and_still_so():
    known = {
        f"{module}:{name}": text
        for module, names in interface.HOROVOD.items()
        for name, text in names.items()
    }
    assert set(interface.LEFT_OUT) | set(interface.DIFFERENT) <= set(known)
    for row in interface.LEFT_OUT:
        with pytest.raises(AttributeError):
            interface.find(row)
    for row, text in interface.DIFFERENT.items():
        assert text != known[row], row
    for use in interface.WITHOUT_MEANING:
        assert use.partition("(")[0] in known
    assert set(interface.DIFFERS) <= set(interface.rows())
    assert all(interface.called_as()[row] == row for row in interface.DIFFERS)


def test_what_horovod_keras_has_more_can_be_left_out():
    """Its own parameters stand at the same places, or are given by name."""
    for name in ("DistributedOptimizer", "PartialDistributedOptimizer"):
        theirs = interface.HOROVOD["keras"][name].split(", ")
        ours = interface.DIFFERENT[f"keras:{name}"].split(", ")
        assert theirs[:8] == ours[:8] and set(theirs) <= set(ours)
