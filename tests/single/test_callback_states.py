"""The state of a callback that is sent to other ranks is plain data, and complete."""

import signal
import threading

import numpy as np

from tfdist.callbacks._callback_states import plain_state


def test_numbers_arrays_and_their_collections_are_sent():
    state = {
        "wait": 3,
        "best": np.float32(0.5),
        "weights": [np.zeros(2), None],
        "history": {"loss": [1.0, 2.0]},
        "names": ["a.keras"],
    }
    assert plain_state(state) == state


def test_what_belongs_to_a_process_is_not_sent():
    state = {
        "params": {"steps": 3},
        "path": "log.csv",
        "lock": threading.Lock(),
        "signals": (signal.SIGTERM,),
        "models": [[object()]],
        "texts": np.array(["a"]),
    }
    assert plain_state(state) == {}
