"""What docs/launching/kubernetes.md says of pods that are evicted or killed, with ranks that are as alone as in pods.

Each rank is the first process of its own PID namespace, as in a container: the kernel ignores SIGTERM to it unless it
has a handler, and it shares no memory with the others.
"""

import os
import re
import shutil
import signal
import subprocess
import sys

import psutil
import pytest

from ring_plugins.core.linux.interfaces import free_port
from tests.launch import REPOSITORY
from tests.launchers import clean_environment

IN_A_POD = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
RANK = """
import os, sys, torch
import ring_plugins as ring
from ring_plugins.torch import DistributedOptimizer, broadcast_parameters
ring.init()
assert os.getpid() == 1
model = torch.nn.Linear(2, 1)
broadcast_parameters(model)
optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
print("trains", flush=True)
alone = 0
while alone < 5:
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    alone += ring.size() == 1
"""


@pytest.fixture
def pods(tmp_path):
    """Two ranks that train, started as indexed_job.yaml starts them with RING_ON_FAILURE=continue."""
    if shutil.which("unshare") is None or subprocess.run([*IN_A_POD, "true"], check=False).returncode:
        pytest.skip("this user may not make PID namespaces")
    script = tmp_path / "train.py"
    script.write_text(RANK)
    port, running = str(free_port()), []
    try:
        for rank in ("0", "1"):
            variables = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
            variables |= {"MASTER_PORT": port, "RING_ON_FAILURE": "continue", "PYTHONPATH": str(REPOSITORY)}
            running.append(
                subprocess.Popen(
                    [*IN_A_POD, sys.executable, script],
                    env=clean_environment() | variables,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        for process in running:
            assert any("trains" in line for line in process.stdout), "it ended before"
        yield running
    finally:
        for process in running:
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_others_go_on_without_a_pod_that_is_evicted_or_killed(pods, lost, number):
    (first,) = psutil.Process(pods[lost].pid).children()
    os.kill(first.pid, number)
    said, _ = pods[1 - lost].communicate(timeout=60)
    assert pods[1 - lost].returncode == 0, said
    how = "left on SIGTERM" if number == signal.SIGTERM else "died"
    assert re.search(rf"rank {lost} \(process .*{how}; the job goes on with 1 of its 2 ranks", said), said
    assert (pods[lost].wait(30) == 0) == (number == signal.SIGTERM)  # Kubernetes: the pod has succeeded, or failed
