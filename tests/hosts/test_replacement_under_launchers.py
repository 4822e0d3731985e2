"""mpirun, torchrun and srun over several hosts: other processes take the places of ranks that are killed."""

import json
import os
import re
import signal
import time

import pytest

from ring_plugins.core.rendezvous import launcher_shim
from tests.hosts import hosts
from tests.hosts.test_healing_under_launchers import LAUNCHERS, start, stop_launcher
from tests.keras import test_replacement as of_keras
from tests.launch import slowness
from tests.lightning import test_replacement as of_lightning
from tests.torch.test_replacement import CHECKS, check

pytestmark = [pytest.mark.slow, pytest.mark.mpi, pytest.mark.parametrize("launcher", LAUNCHERS)]
EVERYONE = [0, 1, 2, 3]


@pytest.fixture(scope="module")
def cluster():
    with hosts(2) as cluster:
        yield cluster


def train(cluster, launcher, deaths, script=CHECKS, env=None, pending=True):
    """Two ranks on each host, as docs/fault_tolerance.md starts train.py."""
    env = {
        "TEST_DEATHS": json.dumps(deaths),
        "TEST_RANKS": "4",
        "TEST_HOSTS": "2",
        "RING_ON_FAILURE": "replace",
        **({"TEST_PENDING": str(60 * slowness())} if pending else {}),
        **(env or {}),
    }
    return start(cluster, launcher, script, env).run(150)


@pytest.mark.parametrize(
    "deaths",
    [
        [[1, 2, "now"]],
        [[0, 2, "now"], [3, 6, "now"]],
        [[0, 2, "barrier 2 in"], [2, 2, "barrier 2 in"]],
        [[1, 2, "now"], [0, 6, "now"], [3, 9, "SIGTERM"]],
    ],
    ids=str,
)
def test_other_processes_take_the_places_of_lost_ranks(cluster, launcher, deaths):
    result = train(cluster, launcher, deaths)
    found, _ = check(result, EVERYONE)
    replaced = {slot for slot, *_ in deaths}
    assert {slot for slot, number in enumerate(found["numbers"]) if number > 3} == replaced
    assert result.output.count("ring run: starting another process in the place of rank") == len(deaths)
    assert re.search(r"ring run: other processes took the place of rank .*, and all 4 ended normally\.", result.output)


@pytest.mark.parametrize("point", ["round 2 before", "round 3 in"])
def test_a_joiner_may_die_while_it_joins_and_the_next_one_joins(cluster, launcher, point):
    found, _ = check(train(cluster, launcher, [[1, 2, "now"], [1, 0, f"joiner {point}"]]), EVERYONE)
    assert found["numbers"] == [0, 6, 2, 3]


def test_nobody_waits_long_for_a_joiner_that_is_stopped_while_it_joins(cluster, launcher):
    result = train(cluster, launcher, [[1, 2, "now"], [1, 0, "joiner round 2 stopped"]])
    found, _ = check(result, EVERYONE)
    assert found["numbers"] == [0, 6, 2, 3]
    assert "which was to join as rank 4, has not answered for 2 s (stopped?). It was killed, and the" in result.output


def test_a_member_may_die_while_another_process_joins(cluster, launcher):
    """Of different hosts, so that both are replaced."""
    found, _ = check(train(cluster, launcher, [[1, 2, "now"], [3, 3, "round 2 in"]]), EVERYONE)
    assert found["numbers"][1] > 3 and found["numbers"][3] > 3


def test_nobody_takes_the_places_of_all_ranks_of_a_host(cluster, launcher):
    result = train(cluster, launcher, [[2, 2, "now"], [3, 2, "now"]], pending=False)
    check(result, [0, 1])
    assert "ring run: nobody takes the place of ranks 2, 3: all ranks of host2 are lost" in result.output


def test_a_process_joins_in_a_fit_of_lightning(cluster, launcher, tmp_path):
    env = {"TEST_ROOT": str(tmp_path)}
    result = train(cluster, launcher, [[0, 1, "now"]], of_lightning.CHECKS, env)
    found, own = of_lightning.check(result, EVERYONE, 4)
    assert own[0]["number"] == 4 and found["history"][-1] == EVERYONE


@pytest.mark.parametrize("backend", of_keras.BACKENDS)
def test_a_process_joins_in_a_fit_of_keras(cluster, launcher, backend):
    result = train(cluster, launcher, [[3, 1, "now"]], of_keras.CHECKS, {"KERAS_BACKEND": backend})
    found, numbers = of_keras.check(result, EVERYONE)
    assert numbers == [0, 1, 2, 5] and found["history"][-1] == EVERYONE


#: Another process takes the place of rank 1. Then rank 3 dies, too, and the process in its place waits for ever.
RANK = """
import os, signal, sys, time
import torch, ring_plugins as ring
from ring_plugins.core.world import current
from ring_plugins.torch import DistributedOptimizer, TrainingState
from tests.worker import report
ring.init(on_failure="replace", min_ranks=2)
me, is_new = ring.rank(), current().is_joining
report("new" if is_new else "first", os.getpid(), me)
model = torch.nn.Linear(2, 1)
torch.nn.init.zeros_(model.weight)
torch.nn.init.zeros_(model.bias)
optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
state = TrainingState(model=model, optimizer=optimizer, step=0)
while True:
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state.step += 1
    has_been_replaced = max(current().world_ranks) > 3
    if not is_new and (me == 1 and state.step == 5 or me == 3 and has_been_replaced):
        os.kill(os.getpid(), signal.SIGKILL)
    if is_new and os.environ["TEST_END"] == "status" and len(current().world_ranks) == 3:
        sys.exit(3)
    if not has_been_replaced:
        state.commit()
    time.sleep(0.02)
"""


def test_the_status_of_a_process_that_has_joined_is_that_of_the_job(cluster, launcher):
    result = start(cluster, launcher, RANK, {"TEST_END": "status"}).run(90, check=False)
    assert result.returncode == (1 if launcher == "torchrun" else 3), result
    assert "ring run: rank 1 ended with exit status 3." in result.output


def shim_on(cluster, host, job):
    """A shim on a host."""
    first_process = cluster.enter(host)[2]
    return next(
        process
        for process in job.processes()
        if launcher_shim._SHIM in process.cmdline() and namespace(process.pid) == namespace(first_process)
    )


def namespace(pid):
    return os.readlink(f"/proc/{pid}/ns/uts")


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGTERM, "Ctrl-C", "shim", "daemon"])
def test_nothing_outlives_a_job_in_which_processes_have_joined_and_wait(cluster, launcher, stop):
    if stop == "daemon" and launcher in ("torchrun", "srun"):
        pytest.skip("the others go on without it")
    with start(cluster, launcher, RANK, {"TEST_END": "never"}) as job:
        end = time.monotonic() + 60 * slowness()
        while not {1, 3} <= {rank for rank, told in job.reports().items() if "new" in told}:
            assert job.process.poll() is None and time.monotonic() < end, job._result()
            time.sleep(0.05)
        if stop == "shim":  # of rank 0's host; under torchrun and srun, another one's loss costs only its host
            shim_on(cluster, "host1", job).kill()
        elif stop == "daemon":
            shim_on(cluster, "host2", job).parent().kill()
        else:
            stop_launcher(job, launcher, stop)
        result = job.wait(40, ignore_files=["sm_segment.*"], grace=15)
    # That of Open MPI is 0 when it has lost the daemon of a host.
    assert result.returncode or (stop == "daemon" and launcher == "mpirun"), result
