"""Where threads stand, in the user's words, and whether a program waits."""

import sys
import threading
import time

import keras
import numpy as np

from tfdist.core.deadlock.call_stack import describe_call, describe_place
from tfdist.core.deadlock.watcher import EAGER, GRAPH, PATIENT, survey

ME = threading.get_ident


def described_in_hooks(**options):
    """The descriptions of a callback's hooks, by name of the hook."""
    found = {}

    class Looks(keras.callbacks.Callback):
        pass

    def looks(hook):
        def method(self, *arguments, **named):
            # Of a callback of tfdist the innermost frame is one of tfdist.
            found[hook] = describe_call(sys._getframe().f_back)

        return method

    for hook in ("on_epoch_end", "on_train_batch_end", "on_train_begin"):
        setattr(Looks, hook, looks(hook))
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.ones((8, 2), "float32")
    model.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=[Looks()], **options)
    return found


def test_a_place_in_fit_is_told_by_step_and_epoch():
    found = described_in_hooks(epochs=3)
    here = "(test_deadlock.py:"
    assert found["on_epoch_end"].startswith(f"step 2 of epoch 3 of model.fit {here}")
    assert found["on_train_batch_end"].startswith("step 2 of epoch 3 of model.fit")
    assert found["on_train_begin"].startswith(f"the start of model.fit {here}")


def test_a_program_without_a_call_has_no_place():
    assert describe_call(sys._getframe()) == ""
    assert describe_place(None) == ""


class Thread:
    """A thread that stands in a function until the test ends."""

    def __init__(self, function):
        self.thread = threading.Thread(target=function, daemon=True)
        self.thread.start()
        self.ident = self.thread.ident


def frames_of(*threads):
    frames = sys._current_frames()
    return {one.ident: frames[one.ident] for one in threads}


def made_of(source, filename, wait):
    """A function as if it were in a file, that calls `wait`."""
    space = {"wait": wait}
    exec(compile(source, filename, "exec"), space)
    return next(v for k, v in space.items() if k not in ("wait", "__builtins__"))


def test_a_program_waits_where_all_threads_that_call_do():
    end = threading.Lock()
    end.acquire()
    wait = end.acquire  # of C: the frame that calls it is the innermost
    folder = keras.__file__.rpartition("keras")[0]
    op = "def tfdist_allreduce():\n    wait()\n    wait2 = 1\n"
    eager = Thread(made_of(op, "<string>", wait))
    runs = "def call_function():\n    wait()\n    wait2 = 1\n"
    graph = Thread(made_of(runs, f"{folder}tensorflow/python/eager/context.py", wait))
    own = Thread(made_of("def f():\n    wait()\n    f2 = 1\n", "/home/me/a.py", wait))
    idle = Thread(lambda: threading.Event().wait())
    time.sleep(0.2)
    try:
        found = survey(frames_of(eager, idle), {eager.ident}, None)
        assert found is not None
        assert found[0] == EAGER
        assert found[1].f_code.co_name == "tfdist_allreduce"
        found = survey(frames_of(eager, graph), {eager.ident}, graph.ident)
        assert found is not None
        assert found[0] == GRAPH
        assert found[1].f_code.co_name == "call_function"
        # Code of the user's that may call something; and that has called something.
        found = survey(frames_of(eager, own), {eager.ident}, None)
        assert found is not None
        assert found[0] == PATIENT
        assert survey(frames_of(eager, own), {own.ident}, None) is None
        frames, helpers = frames_of(eager, own), {own.ident}
        found = survey(frames, {eager.ident}, eager.ident, helpers)
        assert found is not None
        assert found[0] == EAGER
        found = survey(frames, {eager.ident}, own.ident, helpers)
        assert found is not None
        assert found[0] == PATIENT
        assert survey(frames_of(idle), set(), None) is None
    finally:
        for _ in range(3):
            end.release()
            time.sleep(0.02)
