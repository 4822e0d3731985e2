"""How a job comes up in less common ways, and what it says when it cannot."""

import sys

import pytest

from tests.launch import run_ranks


@pytest.mark.mpi
def test_a_script_that_has_initialised_mpi_itself_and_goes_on_using_it():
    script = """
        from mpi4py import MPI
        import numpy as np, ring_plugins as ring
        from tests.worker import report
        before = MPI.COMM_WORLD.allreduce(1)
        ring.init()
        report("sum", float(ring.all_reduce(1.0, ring.SUM)) + before + MPI.COMM_WORLD.allreduce(1))
        ring.shutdown()
        ring.init()
        report("again", float(ring.all_reduce(1.0, ring.SUM)) + MPI.COMM_WORLD.allreduce(1))
    """
    result = run_ranks(script, 2, "mpirun")
    assert result.values("sum") == [6, 6]
    assert result.values("again") == [4, 4]


@pytest.mark.mpi
def test_mpi_without_thread_support_is_served_one_call_at_a_time():
    script = """
        import mpi4py
        mpi4py.rc.thread_level = "single"
        from mpi4py import MPI
        import numpy as np, ring_plugins as ring
        from tests.worker import report
        ring.init()
        works = [ring.all_reduce(np.full(200_000, i, np.float32), ring.SUM, wait=False) for i in range(4)]
        report("sums", [float(work.wait()[-1]) for work in works])
    """
    result = run_ranks(script, 2, "mpirun", env={"RING_VIRTUAL_NODES": "2"})
    assert result.values("sums") == [[0, 2, 4, 6]] * 2


@pytest.mark.mpi
def test_more_ranks_asked_for_than_started_follows_the_launcher_and_says_so():
    script = """
        import ring_plugins as ring
        from tests.worker import report
        ring.init(ranks=3)
        report("size", ring.size())
    """
    result = run_ranks(script, 2, "mpirun")
    assert result.values("size") == [2, 2]
    assert result.output.count("init(ranks=3) was asked for, but mpirun (Open MPI) started 2") == 1


@pytest.mark.parametrize(
    ("hidden", "said"),
    [
        ("sys.modules['mpi4py'] = None", "mpi4py is not installed"),
        ("import mpi4py, os; os.environ['MPI4PY_LIBMPI'] = '/nowhere/libmpi.so'", "finds no MPI library"),
    ],
)
def test_missing_mpi_is_named_with_the_pip_command_that_adds_it(hidden, said):
    pytest.importorskip("mpi4py")
    script = f"""
        import os, sys
        {hidden}
        import ring_plugins as ring
        ring.init()
    """
    env = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    result = run_ranks(script, 1, "spawned", env=env, check=False)
    assert result.returncode != 0
    assert said in result.output
    assert 'pip install "ring_plugins[mpi]"' in result.output


def test_ranks_that_cannot_see_each_others_memory_use_the_plane():
    script = """
        import numpy as np, ring_plugins as ring
        from tests.worker import report
        ring.init()
        x = np.arange(300_001, dtype=np.float32) + ring.rank()
        report("right", bool(np.array_equal(ring.all_reduce(x, ring.SUM), 2 * np.arange(300_001) + 1)))
        report("nodes", ring.num_nodes())
    """
    for launcher in ("mpirun", "torchrun"):
        result = run_ranks(script, 2, launcher, env={"RING_SHARED_MEMORY": "0"})
        assert result.values("right") == [True, True]
        assert result.values("nodes") == [2, 2]


def test_a_rank_that_ends_before_init_is_named():
    script = """
        import os, sys
        import ring_plugins as ring
        if "RING_SPAWNED" in os.environ:
            sys.exit(7)
        ring.init(ranks=2)
    """
    result = run_ranks(script, 2, "spawned", check=False)
    assert result.returncode != 0
    assert "rank 1 ended (exit status 7) before it reached ring_plugins.init()" in result.output


def test_a_session_without_a_script_cannot_grow():
    script = """
        import subprocess, sys
        code = "import ring_plugins as ring; ring.init(ranks=2)"
        done = subprocess.run([sys.executable, "-"], input=code, text=True, capture_output=True)
        assert done.returncode != 0 and "only a script can grow" in done.stderr, done
    """
    run_ranks(script, 1, "spawned")


def test_growing_passes_arguments_modules_and_code_on(tmp_path):
    script = f"""
        import subprocess, sys
        code = "import ring_plugins as ring, sys; ring.init(ranks=2); print(ring.all_gather_object(sys.argv[1:]))"
        done = subprocess.run([{sys.executable!r}, "-c", code, "a b", "--flag"], capture_output=True, text=True)
        assert done.stdout.count("[['a b', '--flag'], ['a b', '--flag']]") == 2, done
    """
    run_ranks(script, 1, "spawned")


def test_more_than_two_gibibytes_in_one_call():
    script = """
        import os
        import numpy as np, ring_plugins as ring
        from tests.worker import report
        ring.init(ranks=2)
        x = np.full((1 << 31) + 12_345, ring.rank() + 1, np.uint8)
        ring.all_reduce(x, ring.SUM, out=x)
        report("sums", [int(x.min()), int(x.max())])
        x[:] = ring.rank()
        ring.broadcast(x, 1, out=x)
        report("broadcast", [int(x.min()), int(x.max())])
    """
    result = run_ranks(script, 2, "spawned", timeout=120)
    assert result.values("sums") == [[3, 3]] * 2
    assert result.values("broadcast") == [[1, 1]] * 2


@pytest.mark.mpi
def test_more_than_two_gibibytes_between_hosts():
    script = """
        import numpy as np, ring_plugins as ring
        from tests.worker import report
        ring.init()
        x = np.full((1 << 31) + 12_345, ring.rank() + 1, np.uint8)
        report("gathered", int(ring.all_gather(x[: (1 << 31) + 5] if ring.rank() else x[:3])[-1]))
    """
    result = run_ranks(script, 2, "mpirun", env={"RING_VIRTUAL_NODES": "2"}, timeout=180)
    assert result.values("gathered") == [2, 2]
