"""`ring_plugins.run` on this host: results and errors come back, and no process stays behind."""

import gc
import os
import signal
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

import ring_plugins as ring
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.members.policy import FailurePolicy
from ring_plugins.core.world import current
from ring_plugins.launcher import calls, function
from ring_plugins.launcher.calls import Driver
from ring_plugins.launcher.function import RemoteRanks, local_ranks
from ring_plugins.launcher.output import Relay
from tests.launch import run_ranks, start_ranks
from tests.launcher.healing_calls import sum_up, train


def test_a_closure_runs_on_every_rank_and_its_results_come_back():
    pytest.importorskip("cloudpickle")
    weights = np.arange(3.0)

    def average(scale, *, offset):
        ring.init()
        here = (ring.rank(), ring.size(), ring.local_rank(), os.environ["MINE"])
        assert ring.rank() or current().summary == "3 ranks on 1 host, started by ring_plugins.run"
        return here, ring.all_reduce(weights * scale + ring.rank() + offset)

    found = ring.run(average, (2.0,), {"offset": 1.0}, ranks=3, env={"MINE": "yes"})
    assert [here for here, _ in found] == [(rank, 3, rank, "yes") for rank in range(3)]
    assert all(np.array_equal(mean, weights * 2 + 2) for _, mean in found)


def divide(by):
    ring.init()
    ring.barrier()
    if ring.rank() == 1:
        return 1 / by
    return ring.all_reduce(1.0)


def test_an_error_comes_back_with_rank_and_traceback(capfd):
    with pytest.raises(ring.RankFailed, match=r"rank 1 on \S+ failed: ZeroDivisionError") as caught:
        ring.run(divide, (0,), ranks=2, tag_output=True)
    assert caught.value.rank == 1
    assert "return 1 / by" in caught.value.traceback
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def handed_on(directory):
    ring.init()
    file = f"{directory}/{ring.rank()}"
    os.system(f"ls /proc/self/fd > {file}")
    with open(file) as listing:
        return listing.read().split()


def test_programs_that_a_rank_starts_get_neither_its_pipe_nor_the_memory_of_the_job(tmp_path):
    assert ring.run(handed_on, (str(tmp_path),), ranks=2) == [["0", "1", "2", "3"]] * 2  # 3: what `ls` reads


def killed():
    ring.init()
    print("speaking before the end")
    sys.stdout.flush()
    if ring.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ring.barrier()


def test_a_killed_rank_is_named_and_output_is_tagged(capsys):
    with pytest.raises(ring.RankFailed, match="rank 1 .* ended with signal SIGKILL"):
        ring.run(killed, ranks=2, tag_output=True)
    assert "[0] speaking before the end\n" in capsys.readouterr().out


def test_wrong_arguments_are_rejected_at_once(monkeypatch):
    with pytest.raises(ring.ArgumentError, match="ranks=0"):
        ring.run(divide, ranks=0)
    with pytest.raises(ring.ArgumentError, match="function='divide' with its arguments cannot be sent"):
        ring.run(divide, (sys._getframe(),), ranks=1)
    with pytest.raises(ring.TimeoutExceeded, match=r"timeout=1: rank 0 of 1"):
        ring.run(time.sleep, (60,), ranks=1, timeout=1)
    monkeypatch.setenv("RING_LAUNCHER", "single")
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    monkeypatch.setattr(divide, "__module__", "__main__")
    with pytest.raises(ring.ArgumentError, match="script or notebook itself.*pip install cloudpickle"):
        ring.run(divide, (1,), ranks=1)


@pytest.mark.parametrize(
    ("arguments", "options", "error"),
    [
        ((divide, 150, 3), {}, r"args=150 is not a list or tuple of .* pass args=\[...\], .* such as ranks=2"),
        ((divide, "ab"), {}, "args='ab' is not a list"),
        ((divide, (1,), 3), {}, r"kwargs=3 is not a dictionary of .* pass kwargs=\{...\}, .* such as ranks=2"),
        ((divide, (1,), {1: 2}), {}, "kwargs={1: 2} is not"),
        ((3,), {}, "function=3 cannot be called: pass the function itself, without calling it"),
        ((divide, (1,)), {"timeout": "10"}, "timeout='10' is not a positive number"),
        ((divide, (1,)), {"hosts": ["a"]}, r"hosts=\['a'\] is not a text: .*host1:2,host2:2"),
        ((divide, (1,)), {"env": {"SECRET": 5678}, "timeout": np.int64(9)}, "env: name and value of 'SECRET' must be"),
    ],
    ids=["args", "args: text", "kwargs", "names in kwargs", "function", "timeout", "hosts", "env"],
)
def test_an_argument_in_another_one_s_place_is_named(arguments, options, error):
    with pytest.raises(ring.ArgumentError, match=error):
        ring.run(*arguments, **options)


def test_a_rank_cannot_start_ranks():
    script = """
        import ring_plugins as ring
        ring.init(ranks=2)
        try:
            ring.run(print, ranks=2)
        except ring.LaunchError as error:
            assert "this process is itself a rank" in str(error)
        else:
            raise AssertionError("ranks of ranks")
    """
    run_ranks(script, 2, "spawned")


DRIVER = """
    import os, time
    import ring_plugins as ring
    from tests.worker import report

    def endless():
        ring.init()
        report("pid", os.getpid())
        while True:
            time.sleep(0.1)

    ring.run(endless, ranks=2, on_failure=os.environ["TEST_ON_FAILURE"])
"""
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("number", "on_failure"),
    [
        (signal.SIGKILL, "end"),
        (signal.SIGINT, "end"),
        pytest.param(signal.SIGTERM, "end", marks=SLOW),
        pytest.param(signal.SIGKILL, "continue", marks=SLOW),
        pytest.param(signal.SIGINT, "continue", marks=SLOW),
    ],
)
def test_no_rank_survives_its_driver(number, on_failure):
    pytest.importorskip("cloudpickle")
    with start_ranks(DRIVER, 2, env={"TEST_ON_FAILURE": on_failure}) as job:
        job.wait_for("pid")
        job.signal_parent(number)
        result = job.wait(10)
    assert result.returncode in (-number, 1)
    assert result.output.count("KeyboardInterrupt") <= 1, result  # of the driver, not of each rank


def test_the_results_of_the_others_are_returned_if_they_go_on(capsys):
    found = ring.run(sum_up, ([0], signal.SIGKILL), ranks=3, on_failure="continue", min_ranks=2, tag_output=True)
    assert found == [(1, 0, 2, 12.0), (2, 1, 2, 12.0)]
    assert list(found.lost) == [0] and "was ended" in found.lost[0]
    said = capsys.readouterr().err
    assert "[1] ring_plugins: rank 0 (process" in said and "the job goes on with 2 of its 3 ranks" in said
    with pytest.raises(ring.ArgumentError, match="min_ranks=4 is more than the 3 ranks"):
        ring.run(sum_up, ([0], signal.SIGKILL), ranks=3, on_failure="replace", min_ranks=4)


def go_on():
    ring.init(on_failure="continue")


def test_init_says_that_run_must_know_of_on_failure():
    with pytest.raises(
        ring.RankFailed, match=r'pass on_failure there instead, ring_plugins.run\(..., on_failure="cont'
    ):
        ring.run(go_on, ranks=2)


def exit_with_a_status():
    os._exit(3)


def fail():
    raise ValueError("on purpose")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victims", "how", "error"),
    [
        ([0, 1], signal.SIGKILL, r"rank 2 on \S+ failed: .*PeerFailed: rank [01] .* min_ranks=2"),
        ([0, 1, 2], signal.SIGKILL, "ring run ended with status 137; .*rank 0: .* was ended; rank 1: .*rank 2: "),
        ([1], exit_with_a_status, r"rank [02] on \S+ failed: .*PeerFailed: rank 1 .* ended with exit status 3"),
        ([1], fail, r"rank 1 on \S+ failed: ValueError: on purpose"),
    ],
)
def test_the_call_fails_if_the_job_cannot_go_on(victims, how, error):
    with pytest.raises(ring.RankFailed, match=error) as found:
        ring.run(sum_up, (victims, how), ranks=3, on_failure="continue", min_ranks=2)
    assert found.value.rank in victims


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("standbys", ["0", "1"])
def test_a_process_that_takes_a_lost_place_returns_its_result(standbys, capfd):
    variables = {"RING_STANDBYS": standbys}
    found = ring.run(train, (signal.SIGKILL, 20), ranks=3, on_failure="replace", env=variables, timeout=120)
    assert [one[:4] for one in found] == [(0, 0, 3, False), (1, 1, 3, True), (2, 2, 3, False)]
    assert found[0][4] == found[1][4] == found[2][4]
    assert found.lost == {}
    assert ("a standby process takes the place of rank 1" in capfd.readouterr().err) == (standbys == "1")


@pytest.mark.slow
def test_a_rank_that_leaves_on_sigterm_has_no_result():
    found = ring.run(train, (signal.SIGTERM, 20), ranks=3, on_failure="continue", min_ranks=2, timeout=120)
    assert [one[:3] for one in found] == [(0, 0, 2), (2, 1, 2)]
    assert found.lost == {1: "left on SIGTERM"}


def remote(driver, hosts="localhost:2", variables=None):
    return RemoteRanks(driver, 2, hosts, FailurePolicy(False, 0), None, variables or {}, False, Relay(False))


def test_values_of_variables_travel_in_the_environment_and_not_on_the_command_line(monkeypatch):
    started = {}

    def start(command, env, **_):
        started.update(command=command, env=env)
        return SimpleNamespace(wait=lambda _: 0)

    monkeypatch.setattr(function.subprocess, "Popen", start)
    with Driver() as driver, remote(driver, variables={"HF_TOKEN": "secret"}):
        pass
    command = started["command"]
    assert command[command.index("HF_TOKEN") - 1] == "-x"
    assert started["env"]["HF_TOKEN"] == "secret"
    key = started["env"]["RING_DRIVER"].split()[-1]
    assert not any("secret" in word or key in word for word in command)


def test_nothing_listens_any_more_if_the_ranks_cannot_be_started(monkeypatch):
    def fail(*_, **__):
        raise OSError(8, "Exec format error")

    def files():
        return len(os.listdir("/proc/self/fd"))

    monkeypatch.setattr(function.subprocess, "Popen", fail)
    gc.collect()  # what earlier tests left
    gc.disable()
    try:
        before = files()
        with pytest.raises(OSError, match="Exec format"), Driver() as driver:
            remote(driver)
        with pytest.raises(ArgumentError), Driver() as driver:
            remote(driver, "local host")
        assert files() <= before
    finally:
        gc.enable()


def test_ring_run_ends_although_the_wait_for_it_is_interrupted(monkeypatch):
    ended = []

    def wait(_):
        raise KeyboardInterrupt

    process = SimpleNamespace(wait=wait, kill=lambda: ended.append("kill"))
    monkeypatch.setattr(function.subprocess, "Popen", lambda *_, **__: process)
    with pytest.raises(KeyboardInterrupt), Driver() as driver, remote(driver):
        pass
    assert ended == ["kill"]


#: Keeps the connection of the process open that it is forked from.
_FORK = "os.fork() or time.sleep(600);"


@pytest.mark.parametrize(
    ("code", "summary", "is_loss"),
    [("exit(3)", "exit status 3", False), ("end", "SIGKILL", True), ("fork and end", "SIGKILL", True)],
)
def test_the_end_of_a_process_of_this_host_that_reports_nothing_is_told(monkeypatch, code, summary, is_loss):
    if code != "exit(3)":
        code = f"import os, time; {_FORK if 'fork' in code else ''} os.kill(os.getpid(), 9)"
    monkeypatch.setattr(calls, "own_python", lambda _: [sys.executable, "-c", code])
    with (
        Driver(listens=False) as driver,
        Relay(False) as relay,
        local_ranks(driver, 1, dict(os.environ), relay),
    ):
        (outcome,) = driver.outcomes(b"", 1, lambda: None, 60)
    assert summary in outcome.failure.summary and outcome.failure.is_loss == is_loss
