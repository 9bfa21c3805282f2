"""The files of deploy/: Kubernetes' schemas, and the syntax of scripts."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers.deadline import deadline
from helpers.tree import ROOT

from tfdist.core.rendezvous.environment import detect

FOLDER = ROOT / "deploy"
TOOLS = ROOT / "build" / "schemas"
PACKAGES = ("kubernetes-validate", "kubeflow-trainer-api")
# The built-in kinds by their published JSON schemas, the others by the models of
# Kubeflow, whose own field for unknown names must stay empty. No package has the schema
# of an MPIJob: its own fields are those of the MPI Operator 0.6 (its API v2beta1), and
# its pods are checked as pods.
CHECK = """
import json, sys
import jsonschema
import kubernetes_validate
from kubeflow_trainer_api import models
MODELS = {
    "JobSet": models.JobsetV1alpha2JobSet,
    "TrainJob": models.TrainerV1alpha1TrainJob,
}
def fields(required=(), **properties):
    names = {"properties": properties, "additionalProperties": False}
    return {"type": "object", "required": list(required), **names}
count, text, anything = {"type": "integer", "minimum": 0}, {"type": "string"}, {}
replicas = fields(
    ["replicas", "template"],
    replicas={"type": "integer", "minimum": 1},
    restartPolicy={"enum": ["Never", "OnFailure"]},
    template=fields(["spec"], metadata=anything, spec=anything),
)
MPI_JOB = fields(
    ["metadata", "spec"],
    apiVersion={"const": "kubeflow.org/v2beta1"},
    kind={"const": "MPIJob"},
    metadata=anything,
    spec=fields(
        ["mpiReplicaSpecs"],
        mpiImplementation={"enum": ["OpenMPI", "Intel", "MPICH"]},
        slotsPerWorker={"type": "integer", "minimum": 1},
        launcherCreationPolicy={"enum": ["AtStartup", "WaitForWorkersReady"]},
        runLauncherAsWorker={"type": "boolean"},
        sshAuthMountPath=text,
        runPolicy=fields(
            cleanPodPolicy={"enum": ["None", "Running", "All"]},
            ttlSecondsAfterFinished=count,
            activeDeadlineSeconds=count,
            backoffLimit=count,
            suspend={"type": "boolean"},
        ),
        mpiReplicaSpecs=fields(["Launcher"], Launcher=replicas, Worker=replicas),
    ),
)
def pods_of(job):
    for name, part in job["spec"]["mpiReplicaSpecs"].items():
        metadata = {**part["template"].get("metadata", {}), "name": name.lower()}
        head = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}
        yield {**head, "spec": part["template"]["spec"]}
def unknown(given, read, path=""):
    if isinstance(given, dict):
        for name, value in given.items():
            if not isinstance(read, dict) or name not in read:
                yield f"{path}/{name}"
            else:
                yield from unknown(value, read[name], f"{path}/{name}")
    if isinstance(given, list):
        for n, value in enumerate(given):
            yield from unknown(value, read[n], f"{path}/{n}")
for document in json.load(sys.stdin):
    if model := MODELS.get(document["kind"]):
        read = model.from_dict(document).to_dict()
        wrong = list(unknown(document, read))
        assert not wrong, wrong
    elif document["kind"] == "MPIJob":
        jsonschema.validate(document, MPI_JOB)
        for pod in pods_of(document):
            kubernetes_validate.validate(pod, "1.30", strict=True)
    else:
        kubernetes_validate.validate(document, "1.30", strict=True)
"""


def documents(name):
    text = (FOLDER / "kubernetes" / name).read_text()
    return list(yaml.safe_load_all(text))


@pytest.fixture(scope="module")
def tools():
    """A folder with the packages that have the schemas."""
    if not (TOOLS / "kubernetes_validate").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--target", str(TOOLS)]
        done = subprocess.run(
            [*pip, *PACKAGES], capture_output=True, text=True, timeout=200
        )
        if done.returncode != 0:
            pytest.skip(f"PyPI cannot be reached: {done.stderr[-300:]}")
    return TOOLS


def check(tools, found):
    return subprocess.run(
        [sys.executable, "-c", CHECK],
        **{"input": json.dumps(found), "env": {"PYTHONPATH": str(tools)}},
        **{"capture_output": True, "text": True, "timeout": 100},
    )


@pytest.mark.slow
@deadline(300)
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("indexed-job.yaml", ["mountPath"]),
        ("jobset.yaml", ["mountPath"]),
        ("trainjob.yaml", ["mountPath"]),
        ("mpijob.yaml", ["tcpSocket", "cleanPodPolicy", "slotsPerWorker"]),
    ],
)
def test_the_manifests_fit_their_schemas(tools, name, fields):
    found = documents(name)
    done = check(tools, found)
    assert done.returncode == 0, done.stderr
    for field in fields:  # a misspelt one is noticed, also at the deepest level
        text = json.dumps(found)
        wrong = text.replace(f'"{field}"', f'"{field.lower()}"')
        assert wrong != text
        assert check(tools, json.loads(wrong)).returncode != 0, field


def container(document):
    """The container of a Job or JobSet, wherever it is."""
    if isinstance(document, dict):
        if "containers" in document:
            return document["containers"][0]
        document = list(document.values())
    found = map(container, document) if isinstance(document, list) else ()
    return next((one for one in found if one), None)


@pytest.mark.parametrize("name", ["indexed-job.yaml", "jobset.yaml"])
def test_the_pods_are_ranks_of_one_job(name):
    document = documents(name)[-1]
    text = json.dumps(document)
    pods = int(re.search(r'"completions": (\d+)', text)[1])
    assert f'"parallelism": {pods}' in text
    environ = {row["name"]: row["value"] for row in container(document)["env"]}
    places = [
        detect({**environ, "JOB_COMPLETION_INDEX": str(index)}) for index in range(pods)
    ]
    assert [place.rank for place in places] == list(range(pods))
    assert {place.size for place in places} == {pods}
    assert len({place.rendezvous for place in places}) == 1


@pytest.mark.parametrize("name", ["slurm/train.sbatch", "pbs/train.pbs"])
def test_the_scripts_are_valid(name):
    done = subprocess.run(
        ["bash", "-n", str(FOLDER / name)], capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 0 and done.stderr == ""


def test_the_mpirun_of_an_mpijob_starts_as_many_ranks_as_its_workers_take():
    (job,) = documents("mpijob.yaml")
    parts = job["spec"]["mpiReplicaSpecs"]
    command = container(parts["Launcher"])["command"]
    ranks = int(command[command.index("-n") + 1])
    assert ranks == parts["Worker"]["replicas"] * job["spec"]["slotsPerWorker"]
    port = container(parts["Worker"])["readinessProbe"]["tcpSocket"]["port"]
    image = (FOLDER / "Dockerfile.mpi").read_text()
    assert image.count(f"'Port {port}'") == 2  # of ssh and of sshd
    assert job["spec"]["sshAuthMountPath"] in image


def test_the_image_copies_files_that_exist():
    sources = re.findall(r"^COPY (\S+) ", (FOLDER / "Dockerfile").read_text(), re.M)
    assert sources[0] == "dist/tfdist-*.whl"  # of make wheel
    assert all((ROOT / Path(name)).is_file() for name in sources[1:])
