"""What a joiner meets in the first hour, started as they would start it: nothing exported, and their own mistakes."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ring_plugins
from ring_plugins.core.linux.thread_count import physical_cores
from tests.launch import REPOSITORY, kill_all, processes_with, slowness
from tests.launchers import LAUNCHERS, clean_environment, is_mpirun_without_ranks, launcher_command

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "PJRT_NPROC")
RING = (sys.executable, "-m", "ring_plugins")
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a script in a session of its own; what still runs of it after the test is killed."""
    started = []

    def begin(script: str, launcher: str = "spawned", **options: object) -> subprocess.Popen[str]:
        (tmp_path / "train.py").write_text(textwrap.dedent(script))
        environment = {name: value for name, value in clean_environment().items() if name not in THREADS}
        settings = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        line = settings.pop("command", None) or [*launcher_command(launcher, 2), "train.py"]
        process = subprocess.Popen(
            line,
            cwd=tmp_path,
            env={**environment, "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(tmp_path)},
            text=True,
            start_new_session=True,
            **settings,
        )
        started.append(process)
        return process

    yield begin
    kill_all(lambda: processes_with("TMPDIR", str(tmp_path)))
    for process in started:
        process.communicate()


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Status, standard output and standard error.

    Open MPI 5's mpirun now and then hangs after its job has ended (https://github.com/openpmix/prrte/issues/1839). It
    is killed then.
    """
    deadline = time.monotonic() + 90 * slowness()
    alone = 0
    while True:
        try:
            out, err = process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            alone = alone + 1 if is_mpirun_without_ranks(process.pid) else 0
            if alone == 3:
                process.kill()
            elif time.monotonic() > deadline:
                raise
        else:
            return process.returncode, out, err


@pytest.mark.parametrize("launcher", ["spawned", "mpirun"])
def test_ranks_share_the_cores_if_nothing_is_exported(start, launcher):
    script = """
        import os, torch
        import ring_plugins as ring
        ring.init(ranks=2)
        os.write(1, f"{torch.get_num_threads()} threads, {os.environ['OMP_NUM_THREADS']} exported\\n".encode())
    """
    status, out, err = finish(start(script, launcher))
    each = max(1, len(physical_cores()) // 2)
    assert (status, out) == (0, f"{each} threads, {each} exported\n" * 2), err
    assert err.count("each of the 2 ranks on this host computes with") == 1


@pytest.mark.parametrize(
    "launcher", [pytest.param(name, marks=[pytest.mark.slow] * (name != "spawned")) for name in LAUNCHERS]
)
def test_a_process_of_multiprocessing_does_not_join_in_the_place_of_its_rank(start, launcher):
    script = """
        import multiprocessing, os
        import ring_plugins as ring

        def run(method, function, *args):
            process = multiprocessing.get_context(method).Process(target=function, args=args)
            process.start()
            process.join()
            return process.exitcode

        if __name__ == "__main__":
            run("forkserver", int)  # so the fork server is older than the job
            ring.init(ranks=2)
            os.write(1, f"{[run(method, ring.init, 2) for method in ('fork', 'spawn', 'forkserver')]}\\n".encode())
            ring.barrier()
    """
    status, out, err = finish(start(script, launcher))
    assert (status, out) == (0, "[1, 1, 1]\n" * 2), err
    for rank in range(2):
        assert err.count(f"this process is a child of rank {rank} (process") == 2
        assert err.count(f"this process was forked from rank {rank} (") == 1


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_workers_load_data(start, launcher):
    script = """
        import os, torch
        from torch.utils.data import DataLoader, TensorDataset
        import ring_plugins as ring

        if __name__ == "__main__":
            ring.init(ranks=2)
            data = TensorDataset(torch.arange(8.0))
            for method in ("fork", "spawn", "forkserver"):
                batches = DataLoader(data, 2, num_workers=2, multiprocessing_context=method)
                total = ring.all_reduce(sum(float(batch.sum()) for (batch,) in batches), ring.SUM)
                os.write(1, f"{method} {total:g}\\n".encode())
    """
    status, out, err = finish(start(script, launcher))
    assert (status, sorted(out.splitlines())) == (0, ["fork 56"] * 2 + ["forkserver 56"] * 2 + ["spawn 56"] * 2), err


@pytest.mark.parametrize(
    ("launcher", "method"),
    [
        ("spawned", "spawn"),
        ("mpirun", "forkserver"),
        pytest.param("spawned", "forkserver", marks=pytest.mark.slow),
        pytest.param("mpirun", "spawn", marks=pytest.mark.slow),
        pytest.param("torchrun", "spawn", marks=pytest.mark.slow),
        pytest.param("torchrun", "forkserver", marks=pytest.mark.slow),
        pytest.param("ring run", "spawn", marks=pytest.mark.slow),
        pytest.param("ring run", "forkserver", marks=pytest.mark.slow),
    ],
)
def test_a_script_without_a_guard_is_shown_the_guard(start, launcher, method):
    script = f"""
        import multiprocessing, sys
        import ring_plugins as ring
        ring.init(ranks=2)
        worker = multiprocessing.get_context("{method}").Process(target=print)
        worker.start()
        worker.join()
        ring.barrier()  # no launcher ends the other rank before its worker has spoken
        sys.exit(worker.exitcode)
    """
    ring_run = [*RING, "run", "-n", "2", sys.executable, "train.py"]
    status, _, err = finish(start(script, command=ring_run) if launcher == "ring run" else start(script, launcher))
    assert status != 0
    assert err.count('if __name__ == "__main__":\n        main()') == 2, err


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_data_loader_without_a_guard_ends_the_job_and_shows_the_guard(start, launcher, method):
    script = f"""
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        import ring_plugins as ring
        ring.init(ranks=2)
        data = TensorDataset(torch.arange(8.0))
        for batch in DataLoader(data, 2, num_workers=2, multiprocessing_context="{method}"):
            ring.barrier()
    """
    status, _, err = finish(start(script, launcher))
    assert status != 0
    assert 'if __name__ == "__main__":\n        main()' in err


@pytest.mark.parametrize("launcher", ["spawned", pytest.param("mpirun", marks=pytest.mark.slow)])
def test_ranks_that_a_program_starts_with_multiprocessing_join_their_own_job(start, launcher):
    script = """
        import multiprocessing, os
        import ring_plugins as ring
        from ring_plugins.core.linux.interfaces import free_port

        def train(rank, port):
            os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            ring.init()
            os.write(1, f"{ring.all_gather_object(os.getppid())}\\n".encode())

        if __name__ == "__main__":
            ring.init(ranks=2)  # even where the program is itself a rank of another job
            if ring.rank() == 0:
                port = free_port()
                ranks = [multiprocessing.get_context("spawn").Process(target=train, args=(r, port)) for r in range(2)]
                for rank in ranks:
                    rank.start()
                for rank in ranks:
                    rank.join()
                print(f"{[os.getpid()] * 2}")
            ring.barrier()
    """
    status, out, err = finish(start(script, launcher))
    assert status == 0, err
    assert len(out.splitlines()) == 3 and len(set(out.splitlines())) == 1


@pytest.mark.parametrize(
    ("death", "words"),
    [
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL (out of memory? `kill -9`?)."),
        ("os.kill(os.getpid(), 11)", "crashed in native code (SIGSEGV)."),
        ("os._exit(3)", "ended with exit status 3 without an exception"),
    ],
)
def test_a_rank_that_dies_silently_is_named_with_its_end(start, death, words):
    script = f"""
        import os
        import ring_plugins as ring
        ring.init(ranks=2)
        if ring.rank() == 1:
            {death}
        ring.barrier()
    """
    status, _, err = finish(start(script))
    assert status != 0
    assert "rank 0 ends because rank 1 (process" in err and words in err


@pytest.mark.parametrize("number", [9, 15])
def test_a_signal_that_ends_rank_0_as_soon_as_it_has_joined_is_reported(start, number):
    script = f"""
        import os, time
        import ring_plugins as ring
        from ring_plugins.core.control.monitor import MonitorThread

        def start_late(self, start=MonitorThread.start):
            if self._failure_detector.rank:
                time.sleep(0.5)  # as on a busy machine
            start(self)

        MonitorThread.start = start_late
        ring.init(ranks=2)
        if ring.rank() == 0:
            os.kill(os.getpid(), {number})
        ring.barrier()
    """
    status, _, err = finish(start(script))
    assert status == -number
    assert "rank 1 ends because rank 0 (process" in err


MISTAKE = """
    import ring_plugins as ring
    ring.init(ranks=2)
    ring.barrier()
    undefined_name
"""


@pytest.mark.parametrize("launcher", ["spawned", "mpirun"])
def test_a_mistake_on_all_ranks_prints_one_traceback(start, launcher):
    status, _, err = finish(start(MISTAKE, launcher))
    assert status == 1
    assert err.count("Traceback (most recent call last)") == 1, err
    assert err.count("NameError: name 'undefined_name' is not defined\n") == 1
    assert "MPI_ABORT was invoked" not in err, "only mpirun's own banner stands below the cause"


def test_the_cause_is_the_last_line_of_a_job_under_mpirun(start, tmp_path):
    command = [sys.executable, "-m", "ring_plugins", "run", "-n", "2", "--with", "mpirun", sys.executable, "train.py"]
    status, _, err = finish(start(MISTAKE, command=command))
    assert status == 1
    last = err.rstrip().splitlines()[-1].lstrip("\0")  # with which Open MPI ends its banner
    assert last.startswith("ring run: rank ") and "failed: NameError: name 'undefined_name'" in last


@pytest.mark.parametrize("launcher", ["spawned", "mpirun"])
def test_an_interrupt_is_shown_once(start, launcher):
    script = """
        import os, time
        import ring_plugins as ring
        ring.init(ranks=2)
        ring.barrier()
        os.write(1, b"ready\\n")
        time.sleep(60)
    """
    process = start(script, launcher)
    assert [process.stdout.readline(), process.stdout.readline()] == ["ready\n"] * 2
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    status, _, err = finish(process)
    assert status != 0
    assert err.count("KeyboardInterrupt") <= 1, err


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_closed_standard_stream_does_no_harm(start, closed, tmp_path):
    script = """
        import ring_plugins as ring
        ring.init(ranks=2)
        open(f"{ring.rank()}.txt", "w").write(str(ring.all_reduce(1.0, ring.SUM)))
    """
    line = ["sh", "-c", f'exec "$0" train.py {closed}{"<" if closed == 0 else ">"}&-', sys.executable]
    status, _, err = finish(start(script, command=line))
    assert status == 0, err
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)] == ["2.0", "2.0"]


def test_far_more_ranks_than_processors_are_warned_of_before_they_start(start):
    script = """
        import os, subprocess
        import ring_plugins as ring
        os.sched_getaffinity = lambda process: {0, 1}
        subprocess.Popen = lambda *args, **options: os._exit(3)  # the first rank to be started ends the test
        ring.init(ranks=65)
    """
    status, _, err = finish(start(script))
    assert status == 3
    assert "starting 65 processes on this host, where 2 processors can run them" in err


@pytest.mark.parametrize("script", ["- --epochs 3", "/dev/stdin"])
def test_a_script_from_standard_input_is_told_to_be_a_file(start, script):
    line = ["sh", "-c", f'"$0" {script} < train.py', sys.executable]
    status, _, err = finish(start("import ring_plugins as ring; ring.init(ranks=2)", command=line))
    assert status == 1 and "this one came from standard input" in err and "mpirun" not in err


@pytest.mark.parametrize("launcher", ["spawned", pytest.param("mpirun", marks=pytest.mark.slow)])
def test_an_impossible_timeline_directory_is_named(start, launcher, tmp_path):
    (tmp_path / "file").touch()
    script = """
        import os
        os.environ["RING_TIMELINE"] = "file/timeline"
        import ring_plugins as ring
        ring.init(ranks=2)
    """
    status, _, err = finish(start(script, launcher))
    assert status != 0, err
    assert err.count("Traceback") == 1, err
    assert err.count("RING_TIMELINE='file/timeline': rank 0 cannot write there (Not a directory)") == 1, err


def typed(start, text, *options):
    """What an interactive Python answers to these lines, and how it ends."""
    process = start("", command=[sys.executable, "-i", *options], stdin=subprocess.PIPE)
    out, err = process.communicate(textwrap.dedent(text), timeout=90)
    return process.returncode, out, err


def test_an_interactive_session_is_told_how_to_start_ranks_and_can(start):
    """As a notebook is one: the input does not come from a file that other ranks could run."""
    text = """
        import ring_plugins as ring
        def train():
            ring.init()
            return float(ring.all_reduce(ring.rank() + 1.0, ring.SUM))

        ring.init(ranks=2)
        print(ring.run(train, ranks=2))
    """
    status, out, err = typed(start, text)
    assert status == 0, err
    assert "and call ring_plugins.run(function, ranks=2) without init()" in err
    assert out == "[3.0, 3.0]\n"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["-n", "0", "python", "train.py"], "-n 0 is not a positive number of ranks: give 1 or more."),
        (["-n", "2", "nothere.py"], "there is no program 'nothere.py' here"),
        (["-n", "two", "train.py"], "Invalid value for '-n'"),
    ],
)
def test_ring_run_answers_wrong_words_without_a_traceback(start, words, text):
    status, out, err = finish(start("", command=[*RING, "run", *words]))
    assert status != 0
    assert text in out + err and "Traceback" not in out + err


@pytest.mark.parametrize("number", ["0", "'2'", "True"])
def test_a_wrong_number_of_ranks_is_named(start, number):
    status, _, err = finish(start(f"import ring_plugins as ring; ring.init(ranks={number})"))
    assert status == 1
    assert f"ArgumentError: ranks={number} is not a positive number of processes." in err


@pytest.mark.parametrize(
    ("variables", "missing"),
    [
        ({"RANK": "0"}, "RANK=0 is set, but WORLD_SIZE and MASTER_ADDR and MASTER_PORT are not"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK=0 and WORLD_SIZE=2 are set, but MASTER_ADDR and MASTER_PORT are not"),
    ],
)
def test_a_half_set_rendezvous_is_rejected(start, variables, missing):
    line = ["env", *(f"{name}={value}" for name, value in variables.items()), sys.executable, "train.py"]
    status, _, err = finish(start("import ring_plugins as ring; ring.init(ranks=2)", command=line))
    assert status == 1
    assert missing in err and "RING_LAUNCHER=single makes it a job of its own" in err


def test_other_systems_are_told_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    spec = importlib.util.spec_from_file_location("elsewhere", str(ring_plugins.__file__))
    assert spec is not None and spec.loader is not None
    with pytest.raises(ImportError, match="runs on Linux, and this is darwin"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
