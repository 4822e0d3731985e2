"""Helper threads: each that dies ends the job, with its traceback on that rank and the cause on the others."""

import ast
import logging
from pathlib import Path

import pytest

from ring_plugins.core.base import threads
from ring_plugins.core.base.threads import HelperThread, until
from tests.launch import run_ranks

PACKAGE = Path(threads.__file__).parents[2]

# Two processes that no launcher ends, and which behave as on two hosts.
JOB = """
import os, socket, subprocess, sys, time
if "RANK" not in os.environ:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    os.environ.update(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RING_SHARED_MEMORY="0")
    other = subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "RANK": "1"})
    os.environ["RANK"] = "0"
import ring_plugins as ring
from ring_plugins.core.collectives import executor
from ring_plugins.core.control import monitor
from ring_plugins.core.net.acceptor import Acceptor
from ring_plugins.core.world import current
from tests.worker import transport
ring.init()
while not current().channel.connected:
    time.sleep(0.01)
ring.barrier()
failing = int(os.environ["TEST_FAILING"])

def broken(*_, **__):
    raise ZeroDivisionError("a bug here")
"""
#: How to make each thread raise.
THREADS = {
    "ring:monitor": "monitor.MonitorThread._end_without_launcher = broken",
    "ring:listener": "Acceptor.poll = broken; socket.create_connection(('127.0.0.1', transport()._listener.port))",
    "ring:ring": "executor.BackgroundWork.run = broken; ring.all_reduce(1.0, wait=False)",
    "ring:ring stand-in": (
        "executor.QueueThread._stand_by = broken; "
        "current().communicator.start('work', lambda: time.sleep(1)).when_done(lambda: None)"
    ),
}


@pytest.mark.parametrize(
    ("thread", "failing"),
    [
        ("ring:monitor", 0),
        ("ring:monitor", 1),
        ("ring:listener", 1),
        ("ring:ring", 0),
        ("ring:ring stand-in", 0),
    ],
)
def test_a_thread_that_dies_ends_the_job_on_all_ranks(thread, failing):
    body = f"""
if ring.rank() == failing:
    {THREADS[thread]}
    time.sleep(60)
ring.barrier()
"""
    result = run_ranks(JOB + body, 2, env={"TEST_FAILING": str(failing)}, timeout=30, check=False)
    assert result.returncode != 0
    assert f"rank {failing} failed: its thread {thread} died:\nTraceback" in result.output, result
    cause = f"rank {failing} failed: its thread {thread} died: ZeroDivisionError: a bug here"
    assert f"rank {1 - failing} ends because {cause}" in result.output, result


def test_the_job_ends_with_the_thread_that_watches_all_ranks():
    """Also where it would go on without a rank that is killed."""
    job = JOB.replace('RING_SHARED_MEMORY="0"', 'RING_VIRTUAL_NODES="2", RING_ON_FAILURE="continue"')
    body = """
if ring.rank() == failing:
    current().elastic.mesh.look = broken
    current().channel.peers.wake()
    time.sleep(60)
ring.barrier()
"""
    result = run_ranks(job + body, 2, env={"TEST_FAILING": "1"}, timeout=30, check=False)
    assert result.returncode != 0
    assert "rank 1 failed: its thread ring:channel died:\nTraceback" in result.output, result
    assert "rank 1 failed: its thread ring:channel died: ZeroDivisionError: a bug here" in result.output, result
    assert "the job goes on" not in result.output


def test_outside_a_job_the_traceback_is_printed_and_the_owner_told(caplog, monkeypatch):
    monkeypatch.setattr(threads.logger, "propagate", True)
    monkeypatch.setattr(threads, "_on_death", lambda name, error: False)
    told = []

    def fail():
        raise ValueError("no data")

    with caplog.at_level(logging.ERROR):
        thread = HelperThread(fail, "ring:test", outside_a_job=lambda: told.append(True))
        thread.start()
        thread.join()
    assert told == [True]
    assert "the thread ring:test died:" in caplog.text and "ValueError: no data" in caplog.text


def test_all_threads_of_the_package_are_helper_threads():
    found = {
        (file.relative_to(PACKAGE).as_posix(), node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id)
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name)
    }
    others = {
        (file, name) for file, name in found if name in ("Thread", "Timer", "start_new_thread", "InheritableThread")
    }
    # These hand their error to the thread that waits for it, or have none: it is about to end the process.
    assert others == {("spark/run.py", "InheritableThread"), ("core/exit_hooks.py", "start_new_thread")}


def test_until_returns_what_it_waited_for_or_what_there_is_when_the_time_is_over():
    values = iter([0, "", "found", "more"])
    assert until(lambda: next(values), 60.0, 0.0) == "found"
    assert until(lambda: "", 0.01) == ""
    assert until(lambda: 7, -1.0) == 7  # looks once even if there is no time


#: By file and by what its name is there, the test that raises in each thread.
DEATH_TESTS = {
    ("core/collectives/background.py", "f'ring:{name}'"): "test_a_thread_that_dies_ends_the_job_on_all_ranks",
    ("core/collectives/background.py", "f'ring:{self._name} stand-in'"): (
        "test_a_thread_that_dies_ends_the_job_on_all_ranks"
    ),
    ("core/control/channel.py", "'ring:channel'"): "test_the_job_ends_with_the_thread_that_watches_all_ranks",
    ("core/control/monitor.py", "'ring:abort'"): "test_a_dead_abort_thread_of_the_monitor_is_told",
    ("core/control/monitor.py", "'ring:monitor'"): "test_a_thread_that_dies_ends_the_job_on_all_ranks",
    ("core/exit_hooks.py", "_ABORTING"): "test_an_abort_that_raises_is_tried_once_and_the_process_ends",
    ("core/gpu/connection.py", "f'ring:abort {self._name}'"): "test_a_dead_abort_thread_of_a_gpu_is_told",
    ("core/net/listener.py", "'ring:listener'"): "test_a_thread_that_dies_ends_the_job_on_all_ranks",
    ("launcher/mpirun.py", '"ring:mpirun\'s errors"'): "test_a_job_whose_mpirun_nobody_hears_ends",
    ("launcher/output.py", "f'ring:output {rank}'"): "test_a_dead_output_thread_closes_its_ranks_pipe",
    ("launcher/preflight.py", "'ring:preflight'"): "test_a_dead_preflight_thread_is_told",
    ("launcher/function.py", "'ring:driver'"): "test_a_rank_whose_driver_thread_dies_ends",
    ("torch/join.py", "'ring:join'"): "test_an_error_in_the_passes_of_one_averager_is_raised_where_the_block_ends",
    ("horovod/torch/__init__.py", "'ring:hvd.join'"): "test_an_error_while_optimizers_take_part_is_raised_in_join",
    ("horovod/tensorflow/joined.py", "'ring:hvd.join'"): "test_an_error_while_optimizers_take_part_is_raised_there",
    ("horovod/named.py", "'ring:named operations'"): "test_operations_whose_group_cannot_be_made_raise_why",
}


def test_every_thread_has_a_death_test():
    found = {
        (file.relative_to(PACKAGE).as_posix(), ast.unparse(node.args[1]))
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("HelperThread")
    }
    assert found == DEATH_TESTS.keys()
    tests = "".join(file.read_text() for file in Path(__file__).parents[2].rglob("test_*.py"))
    assert [name for name in DEATH_TESTS.values() if f"def {name}(" not in tests] == []
