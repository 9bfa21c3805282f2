"""Which launcher's variables give which rank; pure, no processes."""

import pytest

from tfdist.core.rendezvous import auth, links
from tfdist.core.rendezvous.environment import LAUNCHER_JOB, Placement, detect
from tfdist.core.rendezvous.errors import RendezvousError

OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-5508@1",
    "PMIX_RANK": "1",
}
MPICH = {
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "PMI_FD": "9",
    "PMI_HOSTNAME": "host",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "5",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
PALS = {
    "PALS_RANKID": "2",
    "PMI_RANK": "2",
    "PMI_SIZE": "4",
    "PALS_LOCAL_RANKID": "0",
    "PMI_LOCAL_SIZE": "2",
    "PALS_APID": "abc",
}
HOROVODRUN = {
    "HOROVOD_RANK": "1",
    "HOROVOD_SIZE": "2",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711",
}
TFDIST = {"TFDIST_RANK": "0", "TFDIST_SIZE": "2", "TFDIST_RENDEZVOUS": "h:1"}


def place(found: Placement) -> tuple[object, ...]:
    return (
        found.source,
        found.rank,
        found.size,
        found.local_rank,
        found.local_size,
        found.rendezvous,
    )


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ("single", 0, 1, 0, 1, None)),
        ({"HOME": "/root", "RANK": "3"}, ("single", 0, 1, 0, 1, None)),
        (TFDIST, ("tfdist", 0, 2, None, None, "h:1")),
        (OPENMPI, ("openmpi", 1, 4, 1, 2, None)),
        (MPICH, ("mpich", 3, 4, 1, 2, None)),
        (PALS, ("pals", 2, 4, 0, 2, None)),
        (SLURM, ("slurm", 3, 5, 1, 2, None)),
        (TORCHRUN, ("torchrun", 1, 2, 1, 2, "10.0.0.1:29500")),
        # torchrun's own store sits on the port: rank 0 cannot use it.
        (
            {**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"},
            ("torchrun", 1, 2, 1, 2, None),
        ),
        # Other programs set RANK and WORLD_SIZE, too.
        ({"RANK": "1", "WORLD_SIZE": "2"}, ("single", 0, 1, 0, 1, None)),
        # An empty variable is not set.
        ({"TFDIST_RANK": "", "TFDIST_SIZE": ""}, ("single", 0, 1, 0, 1, None)),
    ],
    ids=lambda value: str(value)[:40],
)
def test_each_launcher_is_recognised(environ, expected):
    assert place(detect(environ)) == expected


@pytest.mark.parametrize(
    "environ",
    [
        OPENMPI,
        MPICH,
        PALS,
        SLURM,
        TORCHRUN,
        {**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"},
        {"TFDIST_RANK": "1", "TFDIST_SIZE": "2"},
    ],
    ids=["openmpi", "mpich", "pals", "slurm", "plain", "torchrun", "tfdist"],
)
def test_the_address_of_rank_0_is_heeded_under_every_launcher(environ):
    found = detect({**environ, "TFDIST_RENDEZVOUS": "10.0.0.9:29400"})
    assert found.rendezvous == "10.0.0.9:29400"
    without = detect(environ)
    assert place(found)[:5] == place(without)[:5]


def test_a_batch_script_of_slurm_is_one_process():
    # Slurm tells the script about the tasks that srun would start; nobody did.
    environ = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7"}
    assert place(detect(environ)) == ("single", 0, 1, 0, 1, None)


@pytest.mark.parametrize(
    ("node", "expected"), [("0", 2), ("1", 2), ("2", 1)], ids=["n0", "n1", "n2"]
)
def test_slurm_local_size_comes_from_the_list_of_nodes(node, expected):
    environ = {**SLURM, "SLURM_NODEID": node, "SLURM_LOCALID": "0"}
    assert detect(environ).local_size == expected


@pytest.mark.parametrize(("node", "expected"), [("0", 1), ("1", 3), ("2", 2)])
def test_a_number_without_times_is_of_one_node(node, expected):
    environ = {**SLURM, "SLURM_NODEID": node, "SLURM_LOCALID": "0"}
    environ["SLURM_STEP_TASKS_PER_NODE"] = "1,3,2"
    assert detect(environ).local_size == expected


def test_equal_answers_of_two_launchers_are_fine_and_the_first_wins():
    both = {**MPICH, "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}
    assert detect(both).source == "mpich"


def test_mpi_inside_a_slurm_step_of_its_daemons_is_no_contradiction():
    environ = {**OPENMPI, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    assert place(detect(environ))[:3] == ("openmpi", 1, 4)


def test_a_launcher_started_as_the_only_process_of_another_one_wins():
    environ = {**TFDIST, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert detect(environ).source == "tfdist"


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        (
            {**TFDIST, **OPENMPI},
            ["TFDIST_RANK=0", "TFDIST_SIZE=2", "OMPI_COMM_WORLD_SIZE=4"],
        ),
        ({**TORCHRUN, **MPICH}, ["RANK=1", "WORLD_SIZE=2", "PMI_RANK=3", "PMI_SIZE=4"]),
        (
            {**TFDIST, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
            ["TFDIST_RANK=0", "SLURM_PROCID=1"],
        ),
    ],
    ids=["tfdist-openmpi", "torchrun-mpich", "tfdist-slurm"],
)
def test_contradicting_launchers_are_both_named(environ, named):
    with pytest.raises(RendezvousError) as caught:
        detect(environ)
    for part in named:
        assert part in caught.value.message
    assert caught.value.payload["kind"] == "invalid_argument"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"TFDIST_RANK": "one"}, "TFDIST_RANK='one'"),
        ({"TFDIST_RANK": "-1"}, "TFDIST_RANK='-1'"),
        ({"TFDIST_RANK": "1e3"}, "TFDIST_RANK='1e3'"),
        ({"TFDIST_RANK": "\u0661"}, "TFDIST_RANK="),
        ({"TFDIST_RANK": "2"}, "TFDIST_RANK=2 and TFDIST_SIZE=2"),
        ({"TFDIST_SIZE": "0"}, "TFDIST_SIZE='0'"),
        ({"TFDIST_SIZE": "99999999"}, "TFDIST_SIZE='99999999'"),
        ({"TFDIST_SIZE": ""}, "TFDIST_RANK=0 is set"),
        ({"TFDIST_LOCAL_RANK": "x"}, "TFDIST_LOCAL_RANK='x'"),
        ({"TFDIST_LOCAL_SIZE": "3"}, "TFDIST_LOCAL_SIZE=3"),
        ({"TFDIST_LOCAL_RANK": "1", "TFDIST_LOCAL_SIZE": "1"}, "TFDIST_LOCAL_RANK=1"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_malformed_variable_is_named(change, named):
    with pytest.raises(RendezvousError, match=".") as caught:
        detect({**TFDIST, **change})
    assert named in caught.value.message


def test_other_launchers_malformed_variables_are_named():
    with pytest.raises(RendezvousError, match="PMI_SIZE='many'"):
        detect({"PMI_RANK": "0", "PMI_SIZE": "many"})
    for wrong in ("2x", "2(x2", "2,,1", "2 1", "many"):
        with pytest.raises(RendezvousError, match="is not a list such as") as caught:
            detect({**SLURM, "SLURM_STEP_TASKS_PER_NODE": wrong})
        assert f"SLURM_STEP_TASKS_PER_NODE={wrong!r}" in caught.value.message
    with pytest.raises(RendezvousError, match="SLURM_NODEID=9"):
        detect({**SLURM, "SLURM_NODEID": "9"})


def test_ranks_of_one_job_share_its_name_and_other_jobs_have_another():
    def job(environ, **change):
        return detect({**environ, **change}).job

    assert job(OPENMPI) == job(OPENMPI, OMPI_COMM_WORLD_RANK="0")
    assert job(OPENMPI) != job(OPENMPI, PMIX_NAMESPACE="prterun-host-9@1")
    assert job(SLURM) != job(SLURM, SLURM_STEP_ID="1")
    assert job(TORCHRUN) != job(TORCHRUN, MASTER_PORT="29501")
    assert job(MPICH) is None  # MPICH gives none: the parent process serves
    # So it does for one that has not told its name, as for any job of the host.
    for environ, name in (
        (OPENMPI, "PMIX_NAMESPACE"),
        (PALS, "PALS_APID"),
        (SLURM, "SLURM_JOB_ID"),
        (SLURM, "SLURM_STEP_ID"),
    ):
        assert job({k: v for k, v in environ.items() if k != name}) is None


def test_a_name_that_no_handshake_takes_is_refused_on_every_rank():
    for rank in "01":
        with pytest.raises(RendezvousError, match="TFDIST_JOB_ID has 1200 bytes"):
            detect({**TFDIST, "TFDIST_RANK": rank, "TFDIST_JOB_ID": "é" * 200})
    longest = detect({**TFDIST, "TFDIST_JOB_ID": "x" * 512}).job
    credentials = links.LinkCredentials(
        secret=bytes(32),
        job=f"{longest} 0123456789abcdef",
        generation=1 << 30,
        rank=0,
        frames="hmac-sha256",
        size=1 << 20,
        sockets=16,
    )
    claims = credentials.claims(links.TCP, (1 << 20) - 1)
    auth.hello("0.1.0", bytes(auth.NONCE_BYTES), claims)


def test_only_tfdistrun_serves_the_store():
    assert not detect({**TFDIST, "TFDIST_JOB_ID": "mine"}).launcher_runs_store
    assert detect({**TFDIST, "TFDIST_JOB_ID": f"{LAUNCHER_JOB}1:2"}).launcher_runs_store


def test_horovods_own_launcher_is_recognised_by_its_store():
    found = detect(HOROVODRUN)
    assert (found.rank, found.size, found.local_rank, found.local_size) == (1, 2, 1, 2)
    assert found.source == "horovodrun"
    assert found.job == "horovodrun 127.0.0.1:4711"
    # tfdistrun --horovod sets the place alone, beside its own variables.
    place_only = {k: v for k, v in HOROVODRUN.items() if "GLOO" not in k}
    assert detect(place_only).source == "single"
