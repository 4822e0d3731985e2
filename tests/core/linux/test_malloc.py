"""Memory that a step frees stays in the process, unless the user says otherwise."""

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")

#: Prints what `keep_freed_memory` returns, and the page faults of a step that allocates what the step before it freed.
SCRIPT = """
import resource, sys
from ring_plugins.core.linux.malloc import keep_freed_memory

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
