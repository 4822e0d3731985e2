"""The manifests in examples/deploy use only fields that their operators define, and match the repository."""

import copy
import os
import re
import subprocess

import pytest

from ring_plugins.core.base import config
from tests.deploy.schemas import BY_KIND
from tests.launch import REPOSITORY

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: pip install pyyaml")
jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed: pip install jsonschema")
DEPLOY = REPOSITORY / "examples" / "deploy"
RESOURCES = [
    pytest.param(resource, id=f"{file.name}:{resource['kind']}")
    for file in sorted(DEPLOY.glob("*.yaml"))
    for resource in yaml.safe_load_all(file.read_text())
]


@pytest.mark.parametrize("resource", RESOURCES)
def test_every_field_is_one_that_the_operator_knows(resource):
    jsonschema.validate(resource, BY_KIND[resource["kind"]])
    broken = copy.deepcopy(resource)
    broken["spec"]["cleanPodPolicy"] = "Running"  # where older versions of the operator had it
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, BY_KIND[resource["kind"]])


def containers(resource):
    if isinstance(resource, dict):
        yield from resource.get("containers", [resource["trainer"]] if "trainer" in resource else [])
        for value in resource.values():
            yield from containers(value)


@pytest.mark.parametrize("resource", RESOURCES)
def test_scripts_exist_and_every_rank_has_a_core(resource):
    for container in containers(resource):
        for word in container["command"]:
            assert not word.endswith(".py") or (REPOSITORY / word).exists(), word
        assert container["image"] == "ring-example"
    if resource["kind"] == "MPIJob":
        worker = next(containers(resource["spec"]["mpiReplicaSpecs"]["Worker"]))
        assert int(worker["resources"]["limits"]["cpu"]) >= resource["spec"]["slotsPerWorker"]


def test_the_jobs_pods_find_the_first_by_the_services_name():
    service, job = yaml.safe_load_all((DEPLOY / "indexed_job.yaml").read_text())
    name, spec = job["metadata"]["name"], job["spec"]["template"]["spec"]
    variables = {variable["name"]: variable.get("value") for variable in spec["containers"][0]["env"]}
    assert service["spec"]["selector"] == {"job-name": name}
    assert spec["subdomain"] == service["metadata"]["name"]
    assert variables["MASTER_ADDR"] == f"{name}-0.{spec['subdomain']}"
    assert int(variables["WORLD_SIZE"]) == job["spec"]["completions"] == job["spec"]["parallelism"]


def test_the_job_that_goes_on_without_lost_pods_has_fields_that_kubernetes_knows():
    (block,) = re.findall(
        r"```yaml\n(.*?)```", (REPOSITORY / "docs" / "launching" / "kubernetes.md").read_text(), re.DOTALL
    )
    changes = yaml.safe_load(block)["spec"]
    _, job = yaml.safe_load_all((DEPLOY / "indexed_job.yaml").read_text())
    (container,) = changes.pop("template")["spec"]["containers"]
    del job["spec"]["backoffLimit"]
    job["spec"] |= changes
    job["spec"]["template"]["spec"]["containers"][0]["env"] += container["env"]
    jsonschema.validate(job, BY_KIND["Job"])
    assert job["spec"]["maxFailedIndexes"] < job["spec"]["completions"]
    assert container["env"] == [{"name": config.ON_FAILURE.name, "value": "continue"}]


def test_the_manifests_without_mpi_take_their_secret_from_kubernetes():
    command = "kubectl create secret generic ring --from-file=secret=/dev/stdin"
    assert command in (REPOSITORY / "docs" / "launching" / "kubernetes.md").read_text()
    for name in ("indexed_job.yaml", "pytorchjob.yaml", "trainjob.yaml"):
        text = (DEPLOY / name).read_text()
        job = [*yaml.safe_load_all(text)][-1]
        assert command in text and "A second job needs another name" in text.replace("\n#", "")
        for container in containers(job["spec"]):
            (secret,) = (variable for variable in container["env"] if variable["name"] == "RING_SECRET")
            assert secret["valueFrom"] == {"secretKeyRef": {"name": job["metadata"]["name"], "key": "secret"}}


@pytest.mark.parametrize("name", ["indexed_job.yaml", "pytorchjob.yaml"])
def test_pods_without_sshd_run_where_root_is_refused(name):
    user = re.search(r"useradd .*--uid (\d+)", (DEPLOY / "Dockerfile").read_text())[1]
    for container in containers([*yaml.safe_load_all((DEPLOY / name).read_text())][-1]["spec"]):
        context = container["securityContext"]
        assert (
            context["runAsNonRoot"]
            and context["runAsUser"] == int(user)
            and context["capabilities"] == {"drop": ["ALL"]}
        )
        assert not context["allowPrivilegeEscalation"] and context["seccompProfile"] == {"type": "RuntimeDefault"}


def test_the_launcher_waits_until_its_workers_accept_logins():
    spec = yaml.safe_load((DEPLOY / "mpijob.yaml").read_text())["spec"]
    (worker,) = containers(spec["mpiReplicaSpecs"]["Worker"])
    assert worker["readinessProbe"]["tcpSocket"] == {"port": 22}
    assert spec["launcherCreationPolicy"] == "WaitForWorkersReady"


def test_the_image_takes_neither_an_environment_nor_the_history_of_the_repository():
    left_out = (REPOSITORY / ".dockerignore").read_text().split()
    assert {".git", ".venv", "**/__pycache__"} <= set(left_out)


def test_the_image_installs_what_the_repository_has():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML by itself")
    text = (DEPLOY / "Dockerfile").read_text()
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    (constraints, extras) = re.search(r"pip install \S+ -c (\S+) \"\.\[([\w,]+)\]\"", text).groups()
    assert (REPOSITORY / constraints).exists()
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    (script,) = re.findall(r'CMD \["python", "(\S+)"\]', text)
    assert (REPOSITORY / script).exists()
    assert "openssh-server" in text  # the MPIJob's workers run it


@pytest.mark.parametrize(("doctor", "trains"), [(0, True), (1, True), (2, False), (127, False)])
def test_the_batch_script_trains_after_warnings_and_not_after_errors(doctor, trains, tmp_path):
    """With an srun that only runs its command. Real SLURM is not at hand."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    programs = {
        "srun": 'while [[ $1 == -* ]]; do case $1 in *=*) shift;; *) shift 2;; esac; done; exec "$@"',
        "ring": f"exit {doctor}",
        "python": 'echo "trains, secret of ${#RING_SECRET}, cores $SRUN_CPUS_PER_TASK"',
        "openssl": "echo 0123456789abcdef",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_NNODES": "2"}
    result = subprocess.run(
        ["bash", DEPLOY / "slurm.sh"],
        check=False,
        env=env | {"SLURM_CPUS_PER_TASK": "4"},
        capture_output=True,
        text=True,
    )
    assert (result.returncode == 0) == trains, result
    assert ("trains, secret of 16, cores 4" in result.stdout) == trains, result


def test_the_batch_script_gives_sbatch_no_option_of_srun():
    directives = re.findall(r"^#+SBATCH --([\w-]+)", (DEPLOY / "slurm.sh").read_text(), re.MULTILINE)
    assert "kill-on-bad-exit" not in directives and "nodes" in directives
