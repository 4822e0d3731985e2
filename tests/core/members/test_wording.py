"""What is said of a loss, of ranks that leave, and of those that join."""

from ring_plugins.core.members.wording import too_few_left, what_was_lost, who_joined, who_left


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
        "rank 4 (process 14) in the place of rank 1 and rank 2 (process 12) as an added rank joined;"
    )
