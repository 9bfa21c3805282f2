"""Ranks from a platform's description of its cluster; pure, no processes."""

import json

import pytest

from tfdist.core.rendezvous import cluster_variables
from tfdist.core.rendezvous.child_processes import without_rank
from tfdist.core.rendezvous.environment import detect
from tfdist.core.rendezvous.errors import RendezvousError

WORKERS = ["worker-0.train:2222", "worker-1.train:2222"]


def tf_config(kind, index, **cluster):
    task = {"type": kind, "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


TFJOB = tf_config("worker", 1, chief=["chief-0:2222"], worker=WORKERS, ps=["ps-0:2222"])
# As the documentation of Vertex AI shows it.
VERTEX = {
    "CLUSTER_SPEC": json.dumps(
        {
            "cluster": {
                "workerpool0": ["cmle-training-workerpool0-0:2222"],
                "workerpool1": [
                    "cmle-training-workerpool1-0:2222",
                    "cmle-training-workerpool1-1:2222",
                ],
            },
            "environment": "cloud",
            "task": {"type": "workerpool1", "index": 0},
        }
    )
}
PET = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "auto",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "train-node-0-0.train",
    "PET_MASTER_PORT": "29400",
}
SAGEMAKER = {"SM_HOSTS": '["algo-2", "algo-1"]', "SM_CURRENT_HOST": "algo-2"}
JSRUN = {
    "JSM_NAMESPACE_RANK": "5",
    "JSM_NAMESPACE_SIZE": "8",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "4",
    "LSB_JOBID": "81",
}
FLUX = {
    "FLUX_TASK_RANK": "3",
    "FLUX_JOB_SIZE": "4",
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_JOB_ID": "ƒ2tNcWKqAo",
}
INDEXED_JOB = {
    "JOB_COMPLETION_INDEX": "2",
    "TFDIST_SIZE": "3",
    "TFDIST_RENDEZVOUS": "train-0.train:29600",
}
TORCHRUN = {"MASTER_ADDR": "train-0", "RANK": "1", "WORLD_SIZE": "2"}


def place(environ):
    found = detect(environ)
    return found.source, found.rank, found.size, found.local_rank, found.rendezvous


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (TFJOB, ("tf_config", 2, 3, None, "chief-0:2222")),
        (
            tf_config("chief", 0, chief=["chief-0:2222"], worker=WORKERS),
            ("tf_config", 0, 3, None, "chief-0:2222"),
        ),
        (tf_config("worker", 0, worker=WORKERS), ("tf_config", 0, 2, None, WORKERS[0])),
        (
            VERTEX,
            ("cluster_spec", 1, 3, None, "cmle-training-workerpool0-0:2222"),
        ),
        (PET, ("pet", 1, 2, None, "train-node-0-0.train:29400")),
        (SAGEMAKER, ("sagemaker", 1, 2, None, "algo-1:29600")),
        (JSRUN, ("jsrun", 5, 8, 1, None)),
        (FLUX, ("flux", 3, 4, 1, None)),
        (INDEXED_JOB, ("tfdist", 2, 3, None, "train-0.train:29600")),
        # One host, or nothing described: a job of one process.
        ({"TF_CONFIG": "{}"}, ("single", 0, 1, 0, None)),
        ({"TF_CONFIG": '{"environment": "cloud"}'}, ("single", 0, 1, 0, None)),
        ({"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"},
         ("sagemaker", 0, 1, None, "algo-1:29600")),
        ({"JOB_COMPLETION_INDEX": "2"}, ("single", 0, 1, 0, None)),
        ({"FLUX_JOB_ID": "f1"}, ("single", 0, 1, 0, None)),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_each_platform_is_recognised(environ, expected):
    assert place(environ) == expected


@pytest.mark.parametrize("environ", [TFJOB, VERTEX, PET, SAGEMAKER])
def test_an_address_of_the_user_comes_first(environ):
    own = {**environ, "TFDIST_RENDEZVOUS": "10.0.0.9:29400"}
    assert place(own) == (*place(environ)[:4], "10.0.0.9:29400")


@pytest.mark.parametrize("environ", [TFJOB, VERTEX, PET, SAGEMAKER, JSRUN, FLUX])
def test_the_ranks_of_a_job_share_its_name(environ):
    others = {
        "SM_CURRENT_HOST": "algo-1",
        "PET_NODE_RANK": "0",
        "FLUX_TASK_RANK": "0",
        "JSM_NAMESPACE_RANK": "0",
    }
    other = {name: others.get(name, value) for name, value in environ.items()}
    assert detect(environ).job == detect(other).job is not None


@pytest.mark.parametrize("environ", [TFJOB, VERTEX, PET, SAGEMAKER])
def test_a_launcher_that_covers_all_hosts_wins(environ):
    launched = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}
    assert place({**environ, **launched})[:3] == ("openmpi", 0, 4)


def test_torchrun_on_every_node_of_a_trainjob_wins():
    ranks = {**TORCHRUN, "LOCAL_RANK": "1", "PET_NPROC_PER_NODE": "2"}
    ranks |= {"PET_NNODES": "1:2", "WORLD_SIZE": "4"}
    assert place({**PET, **ranks})[:3] == ("torchrun", 1, 4)


@pytest.mark.parametrize("environ", [TFJOB, VERTEX, PET, SAGEMAKER])
def test_a_launcher_on_one_of_the_hosts_alone_is_a_contradiction(environ):
    launched = {"TFDIST_RANK": "0", "TFDIST_SIZE": "1"}
    with pytest.raises(RendezvousError, match="two launchers contradict") as caught:
        detect({**environ, **launched})
    assert "TFDIST_RANK=0 and TFDIST_SIZE=1" in caught.value.message
    assert detect(environ).variables in caught.value.message


def test_a_job_of_tfdistrun_may_have_lost_hosts():
    """tfdistrun has checked that it starts ranks on all hosts."""
    launched = {"TFDIST_RANK": "0", "TFDIST_SIZE": "1", "TFDIST_JOB_ID": "tfdistrun:1"}
    assert place({**SAGEMAKER, **launched})[:3] == ("tfdist", 0, 1)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"PET_NNODES": "2:4"}, "PET_NNODES='2:4' is a range"),
        ({"PET_NPROC_PER_NODE": "4"}, "numProcPerNode to 1"),
    ],
)
def test_a_rank_is_not_started_in_the_place_of_a_launcher(changed, words):
    environ = {**PET, **changed}
    found = detect(environ)  # tfdistrun may start there
    with pytest.raises(RendezvousError, match=words):
        cluster_variables.check_one_rank_per_host(found, environ)
    cluster_variables.check_one_rank_per_host(detect(PET), PET)
    cluster_variables.check_one_rank_per_host(detect({}), {})


@pytest.mark.parametrize(
    "environ", [TFJOB, VERTEX, PET, SAGEMAKER, JSRUN, FLUX, INDEXED_JOB, TORCHRUN]
)
def test_a_child_of_a_rank_can_be_told_to_forget_it(environ):
    assert detect(without_rank(environ)).size == 1


def test_the_sparse_form_of_tensorflow_is_read():
    cluster = {"worker": {"0": "a:1", "1": "b:1"}}
    assert place(tf_config("worker", 1, **cluster))[:3] == ("tf_config", 1, 2)


def test_descriptions_that_differ_are_both_named():
    with pytest.raises(RendezvousError, match="TF_CONFIG.*SM_HOSTS"):
        detect({**TFJOB, **SAGEMAKER})


def test_ranks_that_number_hosts_are_recognised():
    """Some platforms set RANK and WORLD_SIZE for each host; tfdistrun runs on each."""
    ranks = {"TFDIST_RANK": "3", "TFDIST_SIZE": "4"}
    with pytest.raises(RendezvousError, match="contradict") as caught:
        detect({**TORCHRUN, **ranks})
    assert "RANK=1 and WORLD_SIZE=2 may number hosts" in caught.value.message
    with pytest.raises(RendezvousError, match="contradict") as caught:
        detect({**TORCHRUN, **ranks, "LOCAL_RANK": "1"})
    assert "number hosts" not in caught.value.message


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"TF_CONFIG": "worker"}, "TF_CONFIG='worker' is not a description such as"),
        ({"TF_CONFIG": "[1]"}, "is not a description such as"),
        ({"TF_CONFIG": '{"cluster": {"worker": 3}}'}, "is not a description such as"),
        (tf_config("ps", 0, worker=WORKERS, ps=["a:1"]), "task 0 of type 'ps'"),
        (
            tf_config("evaluator", 0, worker=WORKERS),
            "'evaluator'.*worker.*2 tasks",
        ),
        (tf_config("worker", 2, worker=WORKERS), "task 2 of type 'worker'"),
        ({**PET, "PET_NNODES": "two"}, "PET_NNODES='two' is not a number"),
        ({**PET, "PET_NNODES": "0"}, "PET_NNODES='0' is not a number"),
        ({**PET, "PET_NODE_RANK": "2"}, "PET_NODE_RANK=2 and PET_NNODES=2"),
        ({"TF_CONFIG": '{"cluster": {"worker": "host:1"}}'}, "not a description"),
        (
            {"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}, "task": {"index": 1e999}}'},
            "not a description",
        ),
        (tf_config("worker", 0, worker=["a", "b"]), "first address of TF_CONFIG='a'"),
        ({**SAGEMAKER, "SM_HOSTS": "algo-1"}, "SM_HOSTS='algo-1' is not a JSON list"),
        ({**SAGEMAKER, "SM_CURRENT_HOST": "algo-9"}, "SM_CURRENT_HOST='algo-9' in it"),
        ({**JSRUN, "JSM_NAMESPACE_SIZE": "5"}, "JSM_NAMESPACE_RANK=5"),
        ({**FLUX, "FLUX_JOB_SIZE": "many"}, "FLUX_JOB_SIZE='many'"),
        ({**INDEXED_JOB, "TFDIST_SIZE": "2"}, "JOB_COMPLETION_INDEX=2 and TFDIST_SIZE"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_wrong_is_named(environ, words):
    with pytest.raises(RendezvousError, match=words):
        detect(environ)
