"""Which process is a rank, and which one has only inherited its variables."""

import os

import pytest

import tfdist
from tfdist.core import runtime
from tfdist.core.rendezvous.child_processes import (
    RANK_PROCESS,
    note_rank,
    rank_above,
    refusal,
    without_rank,
)
from tfdist.core.rendezvous.environment import detect

LAUNCHERS = {
    "tfdistrun": {
        **{"TFDIST_RANK": "1", "TFDIST_SIZE": "4", "TFDIST_LOCAL_RANK": "1"},
        **{"TFDIST_JOB_ID": "tfdistrun:1", "TFDIST_RENDEZVOUS": "a:1"},
    },
    "openmpi": {
        **{"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"},
        **{"PMIX_NAMESPACE": "job"},
    },
    "pals": {"PALS_RANKID": "1", "PMI_SIZE": "4", "PALS_APID": "job"},
    "mpich": {"PMI_RANK": "1", "PMI_SIZE": "4"},
    "slurm": {
        **{"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1"},
        **{"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0"},
    },
    "torchrun": {
        **{"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"},
        **{"MASTER_ADDR": "a", "MASTER_PORT": "1"},
    },
    "horovodrun": {
        **{"HOROVOD_RANK": "1", "HOROVOD_SIZE": "4"},
        **{"HOROVOD_GLOO_RENDEZVOUS_ADDR": "a"},
    },
}


def of_parent(environ):
    """The environment that a child inherits from a rank with these variables."""
    inherited = dict(environ)
    note_rank(inherited, detect(environ))
    inherited[RANK_PROCESS] = inherited[RANK_PROCESS].replace(str(os.getpid()), "1", 1)
    return inherited


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_child_is_known_under_every_launcher(launcher):
    environ = LAUNCHERS[launcher]
    own = dict(environ)
    assert rank_above(own) is None
    note_rank(own, detect(own))
    assert rank_above(own) is None and refusal(own) is None  # the rank itself
    pid, placement = rank_above(of_parent(environ))
    assert (pid, placement.rank, placement.size) == (1, 1, 4)
    assert "is a child of rank 1 (process 1), not a rank" in refusal(of_parent(environ))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_nothing_of_a_rank_is_left_for_a_job_of_its_own(launcher):
    settings = {"TFDIST_TIMEOUT_S": "9", "SLURM_JOB_ID": "1", "RANKING": "x"}
    left = without_rank({**of_parent(LAUNCHERS[launcher]), **settings})
    assert left == settings
    assert detect(left).size == 1


def test_a_child_that_is_given_another_place_is_no_childs_rank():
    inherited = of_parent(LAUNCHERS["tfdistrun"])
    for name, value in (("TFDIST_RANK", "2"), ("TFDIST_JOB_ID", "other")):
        assert rank_above({**inherited, name: value}) is None


def test_who_asks_for_the_rank_in_a_child_is_told_so(monkeypatch):
    for name, value in of_parent(LAUNCHERS["mpich"]).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(runtime, "state", runtime.State())
    with pytest.raises(tfdist.NotInitializedError, match="is a child of rank 1"):
        tfdist.rank()
    with pytest.raises(tfdist.NotInitializedError, match="is a child of rank 1"):
        tfdist.init()
