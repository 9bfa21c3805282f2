"""Strangers, and members with a wrong story, at the ports of jobs: a sample.

`make hostile` does the same with a hundred thousand connections.
"""

import pytest
from helpers import hostile
from helpers.strangers import KINDS, AcceptedError, Attack, Job

from tfdist.core.rendezvous import auth
from tfdist.core.rendezvous.address import split_address
from tfdist.core.rendezvous.store import StoreThread

SAMPLE = 2000


@pytest.mark.faults
def test_a_job_survives_strangers_while_it_starts_and_while_it_runs(tmp_path):
    found = hostile.attack_a_job(tmp_path, SAMPLE, seed=1)
    assert set(found.connections) == set(KINDS)
    assert (
        sum(found.connections.values()) >= 0.7 * SAMPLE
    )  # the rest found a port closed
    # Generous: the machine may be busy with other things. `make hostile` measures.
    assert found.start_s < 15.0
    assert found.slowest_s < 15.0
    assert found.grown_bytes <= 8 << 20
    assert found.steps > 5
    assert 1 <= found.warnings <= 30  # it says that it refuses, and does not flood


@pytest.mark.parametrize(
    ("place", "broken", "kind"),
    [
        ("tfdist.core.rendezvous.auth.check_proof", lambda *_: None, "wrong secret"),
        (
            "tfdist.core.rendezvous.store.StoreServer._refusal",
            lambda self, claims: "",
            "wrong member",
        ),
    ],
)
def test_the_harness_notices_what_gets_in(monkeypatch, place, broken, kind):
    """With a check taken out, the attack must report that it was let in."""
    secret = auth.new_secret()
    monkeypatch.setattr(place, broken)
    thread = StoreThread(secret, job="j")
    thread.start()
    try:
        job = Job([split_address(thread.address)], secret, "j", b"x")
        with pytest.raises(AcceptedError):
            Attack(job, seed=1, kinds=(kind,)).run(12, threads=1)
    finally:
        thread.close()
