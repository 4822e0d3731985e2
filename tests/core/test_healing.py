"""Where a job may go on when ranks are lost, and what is said of a loss."""

import sys

import pytest

from ring_plugins.core import healing
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.control.liveness import MOST_MEMBERS
from ring_plugins.core.control.mesh import MOST_RANKS
from ring_plugins.core.healing import (
    ChangeCallbacks,
    FailurePolicy,
    MembershipChange,
    check_policies,
    prepare_to_continue,
    too_few_left,
    what_was_lost,
    who_joined,
    who_left,
)

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
def test_a_wrong_policy_is_refused(arguments, text):
    with pytest.raises(ArgumentError, match=text):
        FailurePolicy.chosen(*arguments)


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


def test_variables_that_have_no_effect_are_named(monkeypatch):
    for name, value in (("RING_MIN_RANKS", "2"), ("RING_MAX_RANKS", "8"), ("RING_SPARES", "1")):
        monkeypatch.setenv(name, value)
    assert FailurePolicy.chosen("replace", None).idle_variables() == []
    growth = [f"RING_{name} has no effect without RING_ON_FAILURE=replace." for name in ("MAX_RANKS=8", "SPARES=1")]
    assert FailurePolicy.chosen("continue", None).idle_variables() == growth
    least = "RING_MIN_RANKS=2 has no effect without RING_ON_FAILURE=continue or replace."
    assert FailurePolicy.chosen(None, None).idle_variables() == [least, *growth]


def test_a_job_has_no_fewer_ranks_than_min_ranks_and_no_more_than_max_ranks(monkeypatch):
    FailurePolicy(True, 2, True, 4).check_size(2)
    FailurePolicy(True, 2, True, 4).check_size(4)
    FailurePolicy(True, 1, True, 1).check_size(1)
    for policy, ranks, text in (
        (FailurePolicy(True, 3, True, 4), 2, "min_ranks=3 is more than the 2 ranks"),
        (FailurePolicy(True, 1, True, 4), 5, "max_ranks=4 is less than the 5 ranks"),
        (FailurePolicy(True, 1, True, MOST_MEMBERS + 1), 2, f"is more than {MOST_MEMBERS}, the most"),
        (FailurePolicy(True, 1, True, 4), 1, "a job of one rank cannot grow"),
    ):
        with pytest.raises(ArgumentError, match=text):
            policy.check_size(ranks)
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
    monkeypatch.setattr(healing, "own_seat", object)
    prepare_to_continue(None, FailurePolicy(True, 1, True), 0)
    with pytest.raises(ArgumentError, match=r"max_ranks=4, but .* was not told that the job may grow: start the job"):
        prepare_to_continue(None, FailurePolicy(True, 1, True, 4), 0)
    monkeypatch.setenv("RING_MAX_RANKS", "4")
    prepare_to_continue(None, FailurePolicy(True, 1, True, 4), 0)


def test_a_launchers_processes_hold_their_slots(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RING_LAUNCHER", "rendezvous")
    with pytest.raises(ArgumentError, match="RANK and MASTER_ADDR if it does not start all ranks on this host"):
        prepare_to_continue(None, CONTINUE, 0)
    held = []
    monkeypatch.setattr(healing, "hold_slot", lambda *arguments: held.append(arguments) or sys.exit())
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
    monkeypatch.setattr(healing, "restart_under_ring_run", lambda *arguments: started.append(arguments) or sys.exit())
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
    with pytest.raises(ArgumentError, match="min_ranks=3 is more than the 2 ranks"):
        check_policies([(True, 3, False), (True, 3, False)], True, False, "")
    with pytest.raises(
        ArgumentError, match="works on several hosts under .* srun, but these are 2 ranks on 2 hosts without them"
    ):
        check_policies([(True, 1, True, 0)] * 2, False, True, "2 ranks on 2 hosts")
    check_policies([(True, 1, True, 0)] * 2, False, True, "2 ranks on 2 hosts", has_seats=True)
    check_policies([(True, 1, True, 4)] * 2, False, True, "2 ranks on 2 hosts", has_seats=True)


def test_ranks_that_were_started_one_by_one_need_nobody_who_holds_their_slots(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "host1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(healing, "hold_slot", lambda *arguments: sys.exit())
    prepare_to_continue(None, CONTINUE, 0)
    with pytest.raises(ArgumentError, match=r'"replace" needs somebody .* start the job with `ring run`, mpirun'):
        prepare_to_continue(None, FailurePolicy(True, 1, True), 0)
    with pytest.raises(ArgumentError, match="cannot be called again"):
        prepare_to_continue(None, CONTINUE, 1)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(SystemExit):
        prepare_to_continue(None, CONTINUE, 0)


def test_one_line_says_which_ranks_died_and_which_cannot_be_reached():
    line = what_was_lost([0, 2], [10, 11, 12, 13], (1, 3), (4, False), 6.0, [2], dict(enumerate("aabb")))
    assert line.startswith(
        "rank 0 (process 10 on a) died; rank 2 (process 12 on b) cannot be reached any more; the job"
    )


def test_one_line_says_who_was_lost_and_how_ranks_are_numbered_now():
    line = what_was_lost([0, 2], [10, 11, 12, 13], (1, 3), (4, False), 0.0123)
    assert line.startswith("rank 0 (process 10) and rank 2 (process 12) died; the job goes on with 2 of its 4 ranks")
    assert "after 12 ms. Nobody takes over the data of these ranks." in line
    assert "rank 1 is now 0, 3 is now 1." in line and "end with rank 0" in line
    assert "is now" not in what_was_lost([3], [10, 11, 12, 13], (0, 1, 2), (4, False), 0.0)
    line = what_was_lost([1], [10, 11, 12, 13], (0, 2, 3), (4, True), 0.0)
    assert "Another process takes its place." in line and "Nobody" not in line


def test_one_line_says_who_left_or_why_all_end():
    line = who_left([0, 2], [10, 11, 12, 13], (1, 3), (4, False))
    assert line.startswith("rank 0 (process 10) and rank 2 (process 12) left on SIGTERM; the job goes on with 2 of its")
    assert "rank 1 is now 0, 3 is now 1." in line
    assert too_few_left([3], [10, 11, 12, 13], [1], 2) == (
        "rank 3 (process 13) got SIGTERM. All ranks end after this step, since training cannot go on with 1 rank: "
        "min_ranks=2."
    )


def test_one_line_says_who_joined_and_where():
    line = who_joined({5: 1}, {0: 10, 4: 14, 5: 15}, (0, 5, 4), 0.0123, 3)
    assert line.startswith("rank 5 (process 15) in the place of rank 1 joined; the job goes on with 3 ranks since")
    assert line.endswith("after 12 ms. Errors keep the old numbers: rank 5 is now 1, 4 is now 2.")
    line = who_joined({4: 1, 2: 2}, {0: 10, 2: 12, 4: 14}, (0, 4, 2), 0.0123, 2)
    assert line.startswith(
        "rank 4 (process 14) in the place of rank 1 and rank 2 (process 12) as a further rank joined;"
    )


def test_changes_are_told_in_order_and_one_that_comes_meanwhile_after_that():
    callbacks, told = ChangeCallbacks(), []
    changes = [MembershipChange((3 - i,), 0, 4 - i, 0, 3 - i) for i in range(3)]

    def first(change):
        told.append(("first", change.size))
        if change is changes[0]:
            callbacks.untold.append(changes[2])  # found in a collective of this function, whose end tells it
            callbacks.tell()

    callbacks.add(first)
    callbacks.add(lambda change: told.append(("second", change.size)))
    callbacks.untold.extend(changes[:2])
    callbacks.tell()
    assert told == [(name, size) for size in (3, 2, 1) for name in ("first", "second")]
    callbacks.remove(first)
    callbacks.untold.append(changes[0])
    callbacks.tell()
    assert told[6:] == [("second", 3)]


def test_a_function_that_raises_hears_of_the_next_change():
    callbacks = ChangeCallbacks()
    callbacks.add(lambda change: 1 / (change.size - 1))
    callbacks.untold.append(MembershipChange((1,), 0, 2, 0, 1))
    with pytest.raises(ZeroDivisionError):
        callbacks.tell()
    callbacks.untold.append(MembershipChange((2,), 0, 3, 0, 2))
    callbacks.tell()
    assert not callbacks.untold
