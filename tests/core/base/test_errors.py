"""Errors travel between processes, and name ranks alike."""

import pickle

from ring_plugins.core.base.errors import PeerFailed, PeerLeft, RankFailed, name_ranks


def test_errors_keep_their_attributes_when_pickled():
    for error in (PeerFailed("gone", 3), PeerLeft("left", 4), RankFailed("failed", 1, "host1", "Traceback")):
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


def test_ranks_are_named_one_by_one_up_to_a_limit():
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([0, 1]) == "ranks 0, 1"
    assert name_ranks(list(range(5)), most=2) == "ranks 0, 1 and 3 more"
