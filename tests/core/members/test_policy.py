"""Where a job may go on when ranks are lost, and what is rejected."""

import sys

import pytest

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.control.liveness import MOST_MEMBERS
from ring_plugins.core.control.mesh import MOST_RANKS
from ring_plugins.core.members import policy
from ring_plugins.core.members.policy import FailurePolicy, check_policies, prepare_to_continue

CONTINUE = FailurePolicy(True, 1)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("restart", None), "on_failure='restart' must be"),
        (("continue", 0), "min_ranks=0 is not a positive"),
        (("continue", True), "min_ranks=True is not a positive"),
        (("continue", "2"), "min_ranks='2' is not a positive"),
        (("replace", 1, 0), "max_ranks=0 is not a positive"),
        (("continue", 1, 4), 'max_ranks=4 needs on_failure="replace"'),
        ((None, 2), 'min_ranks=2 needs on_failure="continue" or "replace".*`ring run --on-failure continue`'),
        (("end", 2), "min_ranks=2 needs"),
    ],
)
def test_a_wrong_policy_is_rejected(arguments, text):
    with pytest.raises(ArgumentError, match=text):
        FailurePolicy.chosen(*arguments)


@pytest.mark.parametrize("on_failure", ["end", "continue"])
@pytest.mark.parametrize("value", ["0", "x", "-1"])
def test_a_wrong_variable_is_rejected_even_where_it_has_no_effect(monkeypatch, on_failure, value):
    """As a rank that looks at it later would fail, while the others train."""
    monkeypatch.setenv("RING_MIN_RANKS", value)
    with pytest.raises(ArgumentError, match=f"RING_MIN_RANKS='?{value}'? is not a "):
        FailurePolicy.chosen(on_failure, None)


def test_the_variables_choose_what_the_arguments_do_not(monkeypatch):
    monkeypatch.setenv("RING_ON_FAILURE", "continue")
    monkeypatch.setenv("RING_MIN_RANKS", "2")
    monkeypatch.setenv("RING_MAX_RANKS", "8")
    assert FailurePolicy.chosen(None, None) == (True, 2, False, 0)
    assert FailurePolicy.chosen("end", None) == (False, 0, False, 0)
    assert FailurePolicy.chosen(None, 4) == (True, 4, False, 0)
    assert FailurePolicy.chosen("replace", None) == (True, 2, True, 8)
    assert FailurePolicy.chosen("replace", None, 6) == (True, 2, True, 6)
    for name in ("end", "continue", "replace"):
        assert FailurePolicy.chosen(name, None).on_failure == name


@pytest.mark.parametrize("variable", ["RING_NCCL_REGISTER", "RING_JAX_NCCL", "RING_TENSORFLOW_NCCL"])
def test_what_would_hold_an_ended_communicator_between_gpus_is_rejected_by_init(monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    with pytest.raises(
        ArgumentError, match=f'{variable}=1 does not work with on_failure="replace".*Unset (it|{variable})'
    ):
        FailurePolicy.chosen("replace", None)
    assert not FailurePolicy.chosen("end", None).recovers


def test_communicators_that_block_are_rejected_where_nccl_is_used_and_only_there(monkeypatch):
    monkeypatch.setenv("NCCL_COMM_BLOCKING", "1")
    FailurePolicy.chosen("end", None).check_nccl()
    chosen = FailurePolicy.chosen("continue", None)  # by `init`, of jobs on CPUs too
    with pytest.raises(ArgumentError, match=r'NCCL_COMM_BLOCKING=1 does not work with on_failure="continue".*Unset it'):
        chosen.check_nccl()
    monkeypatch.setenv("NCCL_COMM_BLOCKING", "0")
    chosen.check_nccl()


def test_variables_that_have_no_effect_are_named(monkeypatch):
    for name, value in (("RING_MIN_RANKS", "2"), ("RING_MAX_RANKS", "8"), ("RING_STANDBYS", "1")):
        monkeypatch.setenv(name, value)
    assert FailurePolicy.chosen("replace", None).idle_variables() == []
    growth = [f"RING_{name} has no effect without RING_ON_FAILURE=replace." for name in ("MAX_RANKS=8", "STANDBYS=1")]
    assert FailurePolicy.chosen("continue", None).idle_variables() == growth
    least = "RING_MIN_RANKS=2 has no effect without RING_ON_FAILURE=continue or replace."
    assert FailurePolicy.chosen(None, None).idle_variables() == [least, *growth]


def test_a_job_has_no_fewer_ranks_than_min_ranks_and_no_more_than_max_ranks(monkeypatch):
    FailurePolicy(True, 2, True, 4).check_size(2)
    FailurePolicy(True, 2, True, 4).check_size(4)
    FailurePolicy(True, 1, True, 1).check_size(1)
    for chosen, ranks, text in (
        (
            FailurePolicy(True, 3, True, 4),
            2,
            "min_ranks=3 is more than the 2 ranks of the job: lower min_ranks or RING_MIN_RANKS, or",
        ),
        (
            FailurePolicy(True, 1, True, 4),
            5,
            "max_ranks=4 is less than the 5 ranks of the job: raise max_ranks or RING_MAX_RANKS, or",
        ),
        (FailurePolicy(True, 1, True, MOST_MEMBERS + 1), 2, f"is more than {MOST_MEMBERS}, the most"),
        (FailurePolicy(True, 1, True, 4), 1, "a job of one rank cannot grow"),
    ):
        with pytest.raises(ArgumentError, match=text):
            chosen.check_size(ranks)
    monkeypatch.setenv("RING_SPAWNED", "5:0:2:0:3")
    monkeypatch.setenv("RING_LOSSES_TOLERATED", "1")
    monkeypatch.setenv("RING_ON_FAILURE", "replace")
    prepare_to_continue(None, FailurePolicy(True, 1, True, 3), 0)
    with pytest.raises(ArgumentError, match=r"max_ranks=4, but ring run was told to have up to 3 ranks"):
        prepare_to_continue(None, FailurePolicy(True, 1, True, 4), 0)
    monkeypatch.setenv("RING_ON_FAILURE", "continue")
    with pytest.raises(ArgumentError, match="nobody would take the place of a lost rank: start it"):
        prepare_to_continue(None, FailurePolicy(True, 1, True), 0)


def test_a_job_with_a_supervisor_on_each_host_grows_as_far_as_ring_run_was_told(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RING_SLOT", "of this process")
    monkeypatch.setenv("RING_LOSSES_TOLERATED", "1")
    monkeypatch.setenv("RING_ON_FAILURE", "replace")
    prepare_to_continue(None, FailurePolicy(True, 1, True), 0)
    with pytest.raises(ArgumentError, match=r"max_ranks=4, but .* was not told that the job may grow: start the job"):
        prepare_to_continue(None, FailurePolicy(True, 1, True, 4), 0)
    monkeypatch.setenv("RING_MAX_RANKS", "4")
    prepare_to_continue(None, FailurePolicy(True, 1, True, 4), 0)


def test_a_launchers_processes_start_anew_under_supervisors(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with monkeypatch.context() as chosen:
        chosen.setenv("RING_LAUNCHER", "rendezvous")
        with pytest.raises(ArgumentError, match="under the variables RANK and MASTER_ADDR, which.* with mpirun"):
            prepare_to_continue(None, CONTINUE, 0)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    held = []
    monkeypatch.setattr(policy, "restart_under_supervisors", lambda *arguments: held.append(arguments) or sys.exit())
    with pytest.raises(ArgumentError, match="min_ranks=5 is more than the 2 ranks"):
        prepare_to_continue(None, FailurePolicy(True, 5), 0)
    with pytest.raises(ArgumentError, match="cannot be called again"):
        prepare_to_continue(None, CONTINUE, 1)
    assert not held
    with pytest.raises(SystemExit):
        prepare_to_continue(None, FailurePolicy(True, 2), 0)
    assert held[0][0].size == 2 and held[0][1:3] == (2, "continue")
    monkeypatch.setenv("WORLD_SIZE", "1")
    prepare_to_continue(None, CONTINUE, 0)
    assert len(held) == 1


def test_so_is_a_ring_run_that_was_not_told(monkeypatch):
    monkeypatch.setenv("RING_SPAWNED", "5:0:2:0:2")
    with pytest.raises(ArgumentError, match="ring run --on-failure continue"):
        prepare_to_continue(None, CONTINUE, 0)
    monkeypatch.setenv("RING_LOSSES_TOLERATED", "1")
    prepare_to_continue(None, CONTINUE, 0)
    with pytest.raises(ArgumentError, match="cannot be called again"):
        prepare_to_continue(None, CONTINUE, 1)


def test_a_script_starts_again_under_ring_run_unless_it_is_alone(monkeypatch):
    started = []
    monkeypatch.setattr(policy, "restart_under_ring_run", lambda *arguments: started.append(arguments) or sys.exit())
    for name in ("RING_SPAWNED", "RANK", "WORLD_SIZE", "RING_LOSSES_TOLERATED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RING_LAUNCHER", "single")
    prepare_to_continue(None, CONTINUE, 0)
    prepare_to_continue(1, CONTINUE, 0)
    with pytest.raises(ArgumentError, match="min_ranks=5 is more than the 4 ranks"):
        prepare_to_continue(4, FailurePolicy(True, 5), 0)
    assert not started
    with pytest.raises(SystemExit):
        prepare_to_continue(4, FailurePolicy(True, 2, replaces=True), 0)
    assert started == [(4, 2, "replace", 0)]
    monkeypatch.setenv("RING_LOSSES_TOLERATED", "1")  # as a script that a rank starts inherits it
    with pytest.raises(ArgumentError, match="does not work under"):
        prepare_to_continue(4, CONTINUE, 0)
    assert len(started) == 1


def test_all_ranks_must_want_it_and_be_able_to():
    check_policies([CONTINUE, CONTINUE], True, False, "")
    check_policies([CONTINUE, CONTINUE], False, True, "")
    with pytest.raises(ArgumentError, match=r"differ by rank: \[\(True, 1, False, 0\), \(False, 0, F"):
        check_policies([CONTINUE, (False, 0, False)], True, False, "")
    with pytest.raises(ArgumentError, match=r"2 ranks on 2 hosts are connected by MPI .* set RING_TRANSPORT=tcp"):
        check_policies([CONTINUE, CONTINUE], False, False, "2 ranks on 2 hosts")
    with pytest.raises(ArgumentError, match=f"up to {MOST_MEMBERS} ranks"):
        check_policies([CONTINUE] * (MOST_MEMBERS + 1), True, True, "")
    with pytest.raises(ArgumentError, match=f"up to {MOST_RANKS} ranks"):
        check_policies([CONTINUE] * (MOST_RANKS + 1), False, True, "")
    with pytest.raises(
        ArgumentError, match="min_ranks=3 is more than the 2 ranks of the job: lower min_ranks or RING_MIN_RANKS, or"
    ):
        check_policies([(True, 3, False), (True, 3, False)], True, False, "")
    with pytest.raises(
        ArgumentError, match="works on several hosts under .* srun, but these are 2 ranks on 2 hosts without them"
    ):
        check_policies([(True, 1, True, 0)] * 2, False, True, "2 ranks on 2 hosts")
    check_policies([(True, 1, True, 0)] * 2, False, True, "2 ranks on 2 hosts", has_slots=True)
    check_policies([(True, 1, True, 4)] * 2, False, True, "2 ranks on 2 hosts", has_slots=True)


def test_ranks_that_were_started_one_by_one_stay_as_they_are(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "host1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(policy, "restart_under_supervisors", lambda *arguments: sys.exit())
    prepare_to_continue(None, CONTINUE, 0)
    with pytest.raises(ArgumentError, match=r'"replace" needs somebody .* start the job with `ring run`, mpirun'):
        prepare_to_continue(None, FailurePolicy(True, 1, True), 0)
    with pytest.raises(ArgumentError, match="cannot be called again"):
        prepare_to_continue(None, CONTINUE, 1)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(SystemExit):
        prepare_to_continue(None, CONTINUE, 0)
