"""Every row of the table of Horovod's interface is called on two ranks.

The calls are those of the other test files; what has not run before is run here. That
the table has the parameters of the interface: tests/single/test_horovod_interface.py.
"""

import pytest
from helpers import horovod_calls
from helpers import horovod_interface as interface
from parallel import test_horovod_callbacks as callbacks
from parallel import test_horovod_common as common
from parallel import test_horovod_gradients as gradients
from parallel import test_horovod_keras as of_keras
from parallel import test_horovod_keras_options as options
from parallel import test_horovod_tensorflow as of_tensorflow

# Alone it runs what in the whole suite has been run before.
pytestmark = [pytest.mark.deadline(600.0), pytest.mark.slow]


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """`horovod_calls`, with `USED` complete."""
    folder = str(tmp_path_factory.mktemp("uses"))
    cases = [
        (callbacks.rates_and_momentum, False),
        (callbacks.broadcast_and_best, folder),
        (callbacks.loaded, folder),
        (callbacks.keras_state,),
        (callbacks.with_options,),
        (common.small_functions,),
        (common.compressions,),
        (common.loaders,),
        (common.states,),
        (common.tape_and_slots,),
        (gradients.tapes, "eager"),
        (gradients.session_steps,),
        (gradients.eager_legacy,),
        (gradients.layers_and_states,),
        (of_keras.fit_with_callbacks,),
        (of_keras.accumulate, "Adam", False, "graph"),
        (of_keras.elastic_fit,),
        (options.values,),
        (options.broadcast_but_the_local_ones,),
        (of_tensorflow.reductions,),
        (of_tensorflow.sparse_reductions,),
        (of_tensorflow.movements,),
        (of_tensorflow.variables_and_objects,),
        (of_tensorflow.topology, folder),
        (of_tensorflow.uneven,),
    ]
    for function, *args in cases:
        if function.__qualname__ not in horovod_calls.DONE:
            init = function is not of_tensorflow.topology
            horovod_calls.on_ranks(function, 2, *args, init=init)
    return horovod_calls


def test_every_parameter_is_given_another_value_than_its_default(calls):
    missing = interface.wanted() - calls.USED
    assert not missing, "\n".join(sorted(missing))


def test_what_has_no_meaning_here_is_told_or_refused(calls):
    uses = {f"{use} {what}" for use, what in interface.WITHOUT_MEANING.items()}
    assert sorted(uses - calls.USED) == []
