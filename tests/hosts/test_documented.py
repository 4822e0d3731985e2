"""Every command on the pages about several hosts, run there: `train.py` is a small script, `node1` is host1."""

import re

import pytest

from tests.documents import commands
from tests.hosts import hosts

pytestmark = pytest.mark.mpi
HERE = "tests/hosts/test_documented.py"
COMMANDS = commands("docs/launching/ring_run.md", HERE) + commands("docs/launching/mpirun.md", HERE)

MEET = """
import os, socket, sys
import numpy as np
import ring_plugins as ring
from tests.worker import report
ring.init()
report("where", [socket.gethostname(), ring.node_rank(), ring.local_rank()])
report("sum", float(ring.all_reduce(1.0, ring.SUM)))
report("arguments", sys.argv[1:])
report("mine", os.environ.get("KERAS_BACKEND"))
print("rank", ring.rank(), "speaks")
"""


@pytest.fixture(scope="module")
def cluster():
    with hosts(2) as cluster:
        yield cluster


@pytest.mark.parametrize("command", COMMANDS)
def test_runs_as_printed(cluster, command, tmp_path):
    (tmp_path / "hosts").write_text("host1 slots=2\nhost2 slots=2\n")
    (tmp_path / "train.py").write_text(MEET)
    here = command.replace("node", "host")
    ranks = int(found[1]) if (found := re.search(r"-np? (\d+)", command)) else 4
    # The harness puts a script behind the command; here that is the shell's, which has no use for it.
    env = {"KERAS_BACKEND": "jax"}  # one of the variables that `ring run` hands on by itself
    result = cluster.start(["sh", "-c", f"cd {tmp_path} && {here}"], "", ranks, env=env).run(timeout=120)
    if "--dry-run" in command:
        assert result.reports == {}
        assert re.search(r"^\S*mpirun .*-H host1:2,host2:2 .* train.py$", result.stdout, re.MULTILINE), result
        return
    hosts_used = [f"host{node + 1}" for node in range(ranks // 2)]
    places = [[host, node, local] for node, host in enumerate(hosts_used) for local in range(2)]
    assert result.values("where") == places
    assert result.values("sum") == [float(ranks)] * ranks
    assert result.values("arguments") == [command.partition("train.py")[2].split()] * ranks
    if command.startswith("ring run"):
        assert result.values("mine") == ["jax"] * ranks
        assert re.search(r"^ring run: \$ \S*mpirun .*-H host1:2,host2:2", result.stderr, re.MULTILINE)
    if "--tag-output" in command:
        assert re.search(r"^\[1,3\]\S* ?rank 3 speaks$", result.stdout, re.MULTILINE), result


def test_there_are_commands():
    assert len(COMMANDS) >= 6
