"""Scripts that spawn their ranks: rendezvous in shared memory, and how children end."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from ring_plugins.core.base import progress_line
from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.base.member import Member
from ring_plugins.core.linux import process
from ring_plugins.core.linux.process import ending
from ring_plugins.core.linux.shared_memory import Segment
from ring_plugins.core.rendezvous import spawn
from ring_plugins.core.rendezvous.launchers import SPAWNED
from ring_plugins.core.rendezvous.record import LaunchRecord
from ring_plugins.core.rendezvous.spawn import SharedMemoryRendezvous, child_environment
from tests.launch import run_ranks


def rendezvous(size):
    """One object for each rank, all on the same segment."""
    segment = Segment.create(SharedMemoryRendezvous.nbytes(size))
    return [SharedMemoryRendezvous(segment, rank, size, []) for rank in range(size)]


def test_every_rank_gets_every_payload_in_every_round():
    ranks = rendezvous(3)
    with ThreadPoolExecutor(3) as pool:
        for round_ in range(5):
            expected = [[rank, round_, "x" * 1000 * rank] for rank in range(3)]
            found = list(pool.map(lambda one, payload: one.gather(payload), ranks, expected))
            assert found == [expected] * 3


def test_what_all_have_read_is_erased():
    ranks = rendezvous(2)
    with ThreadPoolExecutor(2) as pool:
        for payload in ("a secret", "a word", ""):
            list(pool.map(lambda one, told=payload: one.gather(told), ranks))
            assert (b"a secret" in ranks[0].segment.array.tobytes()) == (payload == "a secret")
    assert b"a word" not in ranks[0].segment.array.tobytes()


def test_a_missing_rank_is_named(monkeypatch):
    monkeypatch.setenv("RING_START_TIMEOUT", "0.05")
    with pytest.raises(LaunchError, match=r"rank 0 timed out waiting for ranks 1, 2 to reach init\(\)"):
        rendezvous(3)[0].gather("here")


def test_rank_0_says_who_has_not_come_yet(monkeypatch, capsys):
    monkeypatch.setenv("RING_START_TIMEOUT", "0.3")
    monkeypatch.setattr(progress_line, "FIRST_SECONDS", 0.05)
    ranks = rendezvous(3)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(ranks[rank].gather, "here") for rank in (0, 2)]
        for one in waiting:
            with pytest.raises(LaunchError, match="waiting for rank 1"):
                one.result()
    said = capsys.readouterr().err
    assert said.count("2 of 3 ranks have come, waiting for rank 1 to reach init()") == 1  # nothing has changed since


def test_a_child_that_ends_early_is_named_with_its_end():
    segment = Segment.create(SharedMemoryRendezvous.nbytes(2))
    child = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])
    with pytest.raises(LaunchError, match=r"rank 1 ended \(exit status 7\) before it reached ring_plugins.init"):
        SharedMemoryRendezvous(segment, 0, 2, [child]).gather("here")


def test_a_payload_that_does_not_fit_is_rejected():
    with pytest.raises(LaunchError, match="start-up record of rank 0 is 9002 bytes"):
        rendezvous(1)[0].gather("x" * 9000)


def test_a_child_is_detected_by_its_environment(monkeypatch):
    segment = Segment.create(16)
    for name, value in child_environment(segment, 2, 4, 99).items():
        monkeypatch.setenv(name, value)
    assert spawn.find(SPAWNED) == LaunchRecord(replace(SPAWNED, name="a script that started itself"), 2, 4, 2, 4)
    monkeypatch.setenv("RING_SPAWNED", f"{segment.fd}:0:4:99:4")
    assert spawn.find(SPAWNED) == LaunchRecord(SPAWNED, 0, 4, 0, 4)


def test_a_data_loaders_worker_is_not_the_rank_it_descends_from(monkeypatch):
    segment = Segment.create(SharedMemoryRendezvous.nbytes(2))
    monkeypatch.setenv("RING_SPAWNED", f"{os.dup(segment.fd)}:1:2:1:2")  # its parent would be process 1
    monkeypatch.setattr(spawn, "end_with_parent", lambda: None)
    with pytest.raises(LaunchError, match="inherited RING_SPAWNED from rank 1 but is not that rank"):
        spawn._join()


def test_a_standby_becomes_the_rank_whose_slot_it_gets_and_its_children_do_not(monkeypatch):
    segment = Segment.create(SharedMemoryRendezvous.nbytes(2))
    monkeypatch.setattr(spawn, "end_with_parent", lambda: None)
    monkeypatch.setattr(Segment, "inherited", lambda *_: segment)
    for name, value in {**child_environment(segment, None, 2, 0), "RING_JOINS": "5"}.items():
        monkeypatch.setenv(name, value)
    record = spawn.find(SPAWNED)
    assert (record.rank, record.size, os.environ["LOCAL_RANK"]) == (None, 2, "2")
    slots = SharedMemoryRendezvous(segment, 0, 2, []).slots

    def give():
        while not slots.has_come(5):
            time.sleep(0.001)
        with pytest.raises(LaunchError, match="inherited RING_SPAWNED from a standby but is not that rank"):
            spawn._join()
        slots.give(1, 5)

    giving = threading.Thread(target=give)
    giving.start()
    assert spawn._join().rank == 1
    giving.join()
    assert (spawn.find(SPAWNED).rank, os.environ["LOCAL_RANK"]) == (1, "1")
    slots.take(Member(5, 1, liveness=segment.address), as_member=False)
    with pytest.raises(LaunchError, match="inherited RING_SPAWNED from rank 1 but is not that rank"):
        spawn._join()


def test_only_the_main_thread_spawns(monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "script.py"])
    errors = []

    def start():
        try:
            spawn._spawn(2)
        except LaunchError as error:
            errors.append(str(error))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert "only the main thread" in errors[0]


@pytest.mark.parametrize(("codes", "failed", "status"), [((0, 0), False, 0), ((0, 3), False, 3), ((0, 3), True, 3)])
def test_the_status_of_the_first_child_that_failed_is_the_jobs(codes, failed, status, monkeypatch, capsys):
    children = [subprocess.Popen([sys.executable, "-c", f"raise SystemExit({code})"]) for code in codes]
    one = SharedMemoryRendezvous(Segment.create(SharedMemoryRendezvous.nbytes(3)), 0, 3, children)
    monkeypatch.setattr(spawn, "_rendezvous", one)
    assert spawn.wait_for_children(failed) == status
    reported = "rank 2 ended with exit status 3." in capsys.readouterr().err
    assert reported == bool(status and not failed)


def test_children_that_do_not_end_after_a_failure_are_killed(monkeypatch):
    monkeypatch.setattr(spawn, "_GRACE", 0.05)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    one = SharedMemoryRendezvous(Segment.create(SharedMemoryRendezvous.nbytes(2)), 0, 2, [child])
    monkeypatch.setattr(spawn, "_rendezvous", one)
    assert spawn.wait_for_children(failed=True) == 128 + signal.SIGKILL


def test_a_stopped_child_is_not_waited_for_after_a_failure(monkeypatch):
    """It can do nothing in the seconds that others use to report the failure."""
    monkeypatch.setattr(spawn, "_GRACE", 3600.0)
    child = subprocess.Popen(["sleep", "3600"])
    one = SharedMemoryRendezvous(Segment.create(SharedMemoryRendezvous.nbytes(2)), 0, 2, [child])
    monkeypatch.setattr(spawn, "_rendezvous", one)
    child.send_signal(signal.SIGSTOP)
    while process.state(child.pid) != "T":
        time.sleep(0.01)
    assert spawn.wait_for_children(failed=True) == 128 + signal.SIGKILL


def test_ends_of_processes_have_names():
    assert ending(7) == "exit status 7"
    assert ending(-signal.SIGSEGV) == "signal SIGSEGV"


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


def test_the_script_ends_with_the_status_of_rank_0_not_of_those_that_it_left():
    script = """
        import sys
        import ring_plugins as ring
        ring.init(ranks=2)
        ring.barrier()
        if ring.rank() == 0:
            sys.exit(3)
        ring.barrier()
    """
    assert run_ranks(script, 2, "spawned", check=False).returncode == 3


def test_a_session_without_a_script_cannot_spawn_ranks():
    script = """
        import subprocess, sys
        code = "import ring_plugins as ring; ring.init(ranks=2)"
        done = subprocess.run([sys.executable, "-"], input=code, text=True, capture_output=True)
        assert done.returncode != 0 and "only a script can spawn ranks" in done.stderr, done
    """
    run_ranks(script, 1, "spawned")


def test_spawned_ranks_get_the_same_arguments_and_code(tmp_path):
    script = f"""
        import subprocess, sys
        code = "import ring_plugins as ring, sys; ring.init(ranks=2); print(ring.all_gather_object(sys.argv[1:]))"
        done = subprocess.run([{sys.executable!r}, "-c", code, "a b", "--flag"], capture_output=True, text=True)
        assert done.stdout.count("[['a b', '--flag'], ['a b', '--flag']]") == 2, done
    """
    run_ranks(script, 1, "spawned")


def test_the_variable_of_a_spawned_rank_without_its_file_is_rejected(monkeypatch, tmp_path):
    """Another file under the same number could be mapped, too, and would be overwritten."""
    with open(tmp_path / "file", "w+b") as other:
        other.truncate(SharedMemoryRendezvous.nbytes(2))
        for fd in (-1, 2**31 - 1, other.fileno()):
            monkeypatch.setenv("RING_SPAWNED", f"{fd}:1:2:{os.getppid()}:2")
            with pytest.raises(LaunchError, match="did not inherit the file"):
                spawn._join()
