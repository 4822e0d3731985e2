"""Core counting, process families, limits."""

import os
import platform
import resource
import subprocess
import sys

import pytest

from ring_plugins.core.linux.process import (
    boot_id,
    children,
    cores,
    cpu_quota,
    descendants,
    first_cause,
    raise_open_file_limit,
)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "250000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ({}, 8),
    ],
)
def test_a_container_quota_lowers_the_number_of_cores(files, expected, tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert cores(tmp_path) == expected


def test_a_quota_may_be_a_fraction_of_a_core(tmp_path):
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert cpu_quota(tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cpu_quota(tmp_path) is None
    assert cpu_quota(tmp_path / "nowhere") is None


def test_children_and_their_children_are_found():
    nested = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    with subprocess.Popen([sys.executable, "-c", nested], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()  # the grandchild runs
        family = children()
        assert child.pid in family[os.getpid()]
        assert family[child.pid][0] in descendants(os.getpid(), family)
        child.communicate(b"\n")


def test_the_limit_of_open_files_is_raised_as_far_as_allowed_and_never_lowered():
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
        raise_open_file_limit(300)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 300
        raise_open_file_limit(100)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 300
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_boot_id_stays_the_same():
    assert boot_id() and boot_id() == boot_id()


def test_of_processes_that_failed_the_first_cause_is_known():
    """Who follows another is none, whatever its end, nor who had to be killed; 1 is less likely one than others."""
    assert first_cause({0: 1, 1: 3}, [0, 1], lambda rank: False) == 1
    assert first_cause({0: 1, 1: 1, 2: 1}, [2, 0, 1], lambda rank: rank == 2) == 0
    assert first_cause({0: -6, 1: 1}, [0, 1], lambda rank: rank == 0) == 1
    assert first_cause({0: -9, 1: 1}, [1], lambda rank: False) == 1
    assert first_cause({0: 5, 1: -9}, [1, 0], lambda rank: False) == 1
    assert first_cause({2: 1}, [], lambda rank: True) == 2


pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")

#: Prints what `keep_freed_memory` returns, and the page faults of a step that allocates what the step before it freed.
SCRIPT = """
import resource, sys
from ring_plugins.core.linux.process import keep_freed_memory

def step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    gradients = [bytes([i]) * (16 << 20) for i in range(1, 5)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

kept = keep_freed_memory()
step(), step()
print(kept, step())
"""


def run(script: str, **environment: str) -> list[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    return subprocess.run(
        [sys.executable, "-c", script], env=clean | environment, capture_output=True, text=True, check=True, timeout=120
    ).stdout.split()


def test_a_step_has_no_page_faults_for_what_the_step_before_it_freed():
    kept, faults = run(SCRIPT)
    assert kept == "True"
    assert int(faults) < 1000  # of 16,384


@pytest.mark.parametrize(
    "environment",
    [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}],
    ids=lambda one: next(iter(one)),
)
def test_what_the_user_has_set_for_glibc_stays(environment):
    kept, faults = run(SCRIPT, **environment)
    assert kept == "False"
    assert int(faults) > 16000


RANKS = """
import sys
import ring_plugins as ring
import ring_plugins.core.world as world

calls = []
world.keep_freed_memory = lambda: calls.append(1)
ring.init(ranks=int(sys.argv[1]))
assert len(calls) == int(sys.argv[2]), calls
ring.barrier()
"""


@pytest.mark.parametrize(("size", "environment", "calls"), [(1, {}, 0), (2, {}, 1), (2, {"RING_KEEP_MEMORY": "0"}, 0)])
def test_init_keeps_memory_in_jobs_of_several_ranks(size, environment, calls, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(RANKS)
    subprocess.run(
        [sys.executable, str(script), str(size), str(calls)], env=os.environ | environment, check=True, timeout=120
    )
