"""Each launcher over several hosts, as its page in docs/launching says, with the environment that it sets."""

import shlex
import sys
from pathlib import Path

import pytest

from tests.documents import commands
from tests.hosts import everywhere as commands_everywhere
from tests.hosts import hosts
from tests.launch import REPOSITORY

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: pip install pyyaml")
HERE = "tests/hosts/test_launchers.py"
DEPLOY = REPOSITORY / "examples" / "deploy"

MEET = """
import os, socket
import numpy as np
import ring_plugins as ring
from tests.worker import report
ring.init()
report("where", [socket.gethostname(), ring.rank(), ring.local_rank(), ring.num_nodes(), os.environ.get("MINE")])
report("sum", ring.all_reduce(np.full(3, ring.rank()), ring.SUM))
"""


@pytest.fixture(scope="module")
def cluster():
    with hosts(3) as cluster:
        yield cluster


def check(launch, names):
    result = launch.run(timeout=120)
    where = result.values("where")
    assert [found[:2] for found in where] == [[name, rank] for rank, name in enumerate(names)], result
    assert [found[2] for found in where] == [names[:rank].count(name) for rank, name in enumerate(names)]
    assert {found[3] for found in where} == {len(set(names))}
    assert result.values("sum") == [[sum(range(len(names)))] * 3] * len(names)
    return result


def everywhere(cluster, each, per_host=1, env=(), ranks=2):
    """One command on host1 and host2 each; `{node}`, `{local}` and `{rank}` become numbers."""
    return cluster.start([*commands_everywhere(["host1", "host2"], per_host), "env", *env, *each], MEET, ranks)


SLURM = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": "{rank}", "SLURM_LOCALID": "{local}",
    "SLURM_NODEID": "{node}", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "host[1-2]",
    "SLURM_JOB_NODELIST": "host[1-2]", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_JOB_NAME": "train",
}  # fmt: skip


def test_srun(cluster):
    env = [f"{name}={value}" for name, value in SLURM.items()]
    check(everywhere(cluster, [sys.executable], 2, env, 4), ["host1", "host1", "host2", "host2"])


def documented(*words):
    """The command of docs/launching/torchrun.md that holds all `words`, as typed on each of the two hosts."""
    first, second = (
        line for line in commands("docs/launching/torchrun.md", HERE) if all(word in line for word in words)
    )
    for text in ("--node-rank 0", "RANK=0 "):
        first = first.replace(text, text.replace("0", "{node}"), 1)
    assert first.replace("{node}", "1", 1) == second
    *command, script = shlex.split(first.replace("node1", "host1"))
    assert script == "train.py"
    return [{"torchrun": "-m torch.distributed.run", "python": sys.executable}.get(word, word) for word in command]


@pytest.mark.slow
def test_torchrun(cluster):
    program, *options = documented("torchrun", "--node-rank")
    job = everywhere(cluster, [sys.executable, *program.split(), *options], ranks=4)
    check(job, ["host1", "host1", "host2", "host2"])


@pytest.mark.slow  # torchrun again, with its options in variables; tests/deploy checks the manifest itself
def test_pytorchjob(cluster):
    """The operator runs the manifest's command with torchrun's options in variables, under both names."""
    spec = yaml.safe_load((DEPLOY / "pytorchjob.yaml").read_text())["spec"]
    (container,) = spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    each, (program, _script) = spec["nprocPerNode"], container["command"]
    assert program == "torchrun"
    env = [
        "MASTER_ADDR=host1", "MASTER_PORT=23456", "WORLD_SIZE=4", "RANK={node}", "PYTHONUNBUFFERED=1",
        "PET_MASTER_ADDR=host1", "PET_MASTER_PORT=23456", "PET_NNODES=2", "PET_NODE_RANK={node}",
        f"PET_NPROC_PER_NODE={each}", *(f"{one['name']}={one.get('value', 'hush')}" for one in container["env"]),
    ]  # fmt: skip
    job = everywhere(cluster, [sys.executable, "-m", "torch.distributed.run"], 1, env, 4)
    check(job, ["host1", "host1", "host2", "host2"])


def test_variables_alone_and_indexed_job(cluster):
    _, job = yaml.safe_load_all((DEPLOY / "indexed_job.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    variables = {variable["name"]: variable.get("value", "{rank}") for variable in container["env"]}
    variables["RING_SECRET"] = "hush"
    *words, program = documented("RANK=")
    typed = dict(word.split("=") for word in words)
    assert set(typed) == set(variables) - {"RING_INTERFACE", "RING_SECRET"}
    assert container["command"][0] == "python"
    env = [f"{name}={value}" for name, value in {**variables, **typed, "JOB_COMPLETION_INDEX": "{rank}"}.items()]
    check(everywhere(cluster, [program], 1, env), ["host1", "host2"])


@pytest.mark.mpi
def test_mpijob(cluster, tmp_path):
    """The launcher is no worker; the operator sets Open MPI 4's variables and writes the hostfile."""
    spec = yaml.safe_load((DEPLOY / "mpijob.yaml").read_text())["spec"]
    (launcher,) = spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"]
    workers = range(2, 2 + spec["mpiReplicaSpecs"]["Worker"]["replicas"])
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("".join(f"host{i} slots={spec['slotsPerWorker']}\n" for i in workers))
    command = [{"/etc/mpi/hostfile": str(hostfile), "python": sys.executable}.get(w, w) for w in launcher["command"]]
    assert command.pop().endswith(".py")
    env = {
        "K_MPI_JOB_ROLE": "launcher", "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
        "OMPI_MCA_orte_default_hostfile": str(hostfile), "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
        "OMPI_MCA_orte_set_default_slots": str(spec["slotsPerWorker"]),
    }  # fmt: skip
    job = cluster.start([str(Path(sys.executable).parent / "ring"), *command[1:]], MEET, 4, env=env)
    result = check(job, ["host2", "host2", "host3", "host3"])
    assert "ring run: $" in result.stderr, shlex.join(command)
