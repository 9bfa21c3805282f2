"""SIGTERM to a rank that can hand over, in processes of their own."""

import signal
import subprocess
import sys
import time

from helpers.deadline import deadline
from helpers.launcher import clean_environment

BEGIN = """
import hashlib, multiprocessing, os, signal, sys, time
from tfdist.core.term_signal import TermSignal
def show(text):
    os.write(1, (text + "\\n").encode())
term = TermSignal(lambda: show("noticed"))
def compute(rounds):  # holds the main thread, as an operation of TensorFlow does
    hashlib.pbkdf2_hmac("sha256", b"a", b"b", rounds)
"""


def start(code):
    process = subprocess.Popen(
        [sys.executable, "-c", BEGIN + code],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    return process


def end(process):
    """Waits; returns the exit code and the rest of the output."""
    output, _ = process.communicate(timeout=20)
    return process.returncode, output.split()


@deadline(30)
def test_the_signal_is_noticed_while_the_main_thread_is_busy():
    process = start(
        "term.listen(); show('ready'); compute(4 * 10**6); show('computed')"
    )
    process.send_signal(signal.SIGTERM)
    assert end(process) == (0, ["noticed", "computed"])


@deadline(30)
def test_a_second_signal_ends_a_busy_process_at_once():
    process = start("term.listen(); show('ready'); compute(10**9)")
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)  # passed on by a batch system as well
    assert process.stdout.readline() == "noticed\n"
    time.sleep(0.3)
    assert process.poll() is None
    time.sleep(1.0)
    process.send_signal(signal.SIGTERM)
    assert end(process) == (143, [])


@deadline(30)
def test_a_handler_of_the_program_stays():
    process = start(
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); term.listen(); "
        "assert not term.listens; show('ready'); time.sleep(20)"
    )
    process.send_signal(signal.SIGTERM)
    assert end(process) == (7, [])


@deadline(30)
def test_the_signal_ends_the_process_as_usual_after_the_loop():
    process = start("term.listen(); term.close(); show('ready'); time.sleep(20)")
    process.send_signal(signal.SIGTERM)
    assert end(process) == (-signal.SIGTERM, [])


@deadline(30)
def test_the_signal_to_a_forked_process_is_its_own():
    code = """
term.listen()
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(20,))
child.start()
show("ready")
child.terminate()
child.join(10)
show(f"child {child.exitcode} {term.received}")
"""
    assert end(start(code)) == (0, ["child", "-15", "False"])
