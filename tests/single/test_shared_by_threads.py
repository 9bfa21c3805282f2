"""State that the threads of a process share: one changes it while others use it."""

import sys
import threading

import pytest
import tensorflow as tf

from tfdist.collectives import per_rank_variables
from tfdist.collectives.tf_ops import call_order

THREADS = 8


@pytest.fixture
def raised():
    """Calls a function with a number in eight threads; returns the exceptions."""

    def run(work):
        errors = []

        def guarded(thread):
            try:
                work(thread)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=guarded, args=[n]) for n in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
            assert not thread.is_alive()
        return errors

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns often
    yield run
    sys.setswitchinterval(before)


class TracedFunction:
    """The parts of TensorFlow's AtomicFunction that `claim_when_called` uses."""

    cached_definition, children = None, ()

    def __init__(self, name):
        self.name = name

    def call_flat(self):
        return self.name


def test_threads_call_more_functions_than_are_remembered(raised):
    class Function(TracedFunction):
        pass

    call_order.claim_when_called(Function)
    names = []

    def call(thread):
        for n in range(3000):
            names.append(Function(f"{thread} {n}").call_flat())

    assert raised(call) == []
    assert len(set(names)) == 3000 * THREADS


def test_threads_broadcast_more_lists_than_are_remembered(raised):
    variables = [tf.Variable(0.0) for _ in range(THREADS * 100)]

    def broadcast(thread):
        for own in variables[thread::THREADS]:
            per_rank_variables.note_broadcast([own, variables[0]])
            per_rank_variables.broadcast_with([own])

    assert raised(broadcast) == []
    assert len(per_rank_variables._broadcast_lists) == 64
