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
# Kubeflow, whose own field for unknown names must stay empty.
CHECK = """
import json, sys
import kubernetes_validate
from kubeflow_trainer_api import models
MODELS = {
    "JobSet": models.JobsetV1alpha2JobSet,
    "TrainJob": models.TrainerV1alpha1TrainJob,
}
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
@pytest.mark.parametrize("name", ["indexed-job.yaml", "jobset.yaml", "trainjob.yaml"])
def test_the_manifests_fit_their_schemas(tools, name):
    found = documents(name)
    done = check(tools, found)
    assert done.returncode == 0, done.stderr
    # A misspelt field at the deepest level is noticed.
    text = json.dumps(found).replace('"mountPath"', '"mountpath"', 1)
    assert check(tools, json.loads(text)).returncode != 0


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


def test_the_image_copies_files_that_exist():
    sources = re.findall(r"^COPY (\S+) ", (FOLDER / "Dockerfile").read_text(), re.M)
    assert sources[0] == "dist/tfdist-*.whl"  # of make wheel
    assert all((ROOT / Path(name)).is_file() for name in sources[1:])
