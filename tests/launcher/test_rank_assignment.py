"""Ranks for processes that a cluster has placed."""

from ring_plugins.launcher.rank_assignment import RankAssignment, assign_ranks


def test_ranks_of_one_host_follow_each_other_whatever_the_schedulers_order():
    assert assign_ranks(["a", "b", "a"]) == [
        RankAssignment(0, 3, 0, 2, 0, 2),
        RankAssignment(2, 3, 0, 1, 1, 2),
        RankAssignment(1, 3, 1, 2, 0, 2),
    ]


def test_an_assignment_overrides_the_launcher_under_which_the_scheduler_runs():
    (alone,) = assign_ranks(["a"])
    variables = alone.environment("10.0.0.1", 4000, "hush")
    assert variables["RING_SECRET"] == "hush"
    assert (variables["RING_LAUNCHER"], variables["RANK"], variables["WORLD_SIZE"]) == ("rendezvous", "0", "1")
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("10.0.0.1", "4000")
