"""Errors travel between processes, and name ranks alike."""

import pickle

from ring_plugins.core.base.errors import (
    PeerFailed,
    PeerLeft,
    RankFailed,
    RingError,
    fresh,
    name_ranks,
    printable,
    quoted,
)


def test_errors_keep_their_attributes_when_pickled():
    for error in (PeerFailed("gone", 3), PeerLeft("left", 4), RankFailed("failed", 1, "host1", "Traceback")):
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


def test_a_fresh_copy_of_an_error_has_all_but_its_traceback():
    class Strange(Exception):
        def __init__(self, first, second):
            super().__init__(f"{first} {second}")

    for error in (RingError("broken"), PeerLeft("left", 4), RankFailed("failed", 1, "host1"), Strange(1, 2)):
        error.note, error.__cause__ = "seen", OSError()
        copy = fresh(error)
        assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))
        assert copy.__cause__ is error.__cause__ and copy.__traceback__ is None


def test_ranks_are_named_one_by_one_up_to_a_limit():
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([]) == "the other ranks"
    assert name_ranks([0, 1]) == "ranks 0, 1"
    assert name_ranks(list(range(5)), most=2) == "ranks 0, 1 and 3 more"


def test_text_of_another_process_is_one_line_without_control_characters():
    said = "h\x1b]0;a title\x07\x1b[2J\r\nring_plugins: all ranks are up\u2028\u202e\ud800\x9b31m é 主"
    shown = quoted(said)
    assert shown.isprintable()
    assert shown == r"h\x1b]0;a title\x07\x1b[2J\r\nring_plugins: all ranks are up\u2028\u202e\ud800\x9b31m é 主"
    assert quoted("x" * 300) == "x" * 200 + "..." and quoted("x" * 30, 30) == "x" * 30
    assert len(quoted("\x1b" * 10**6)) < 1000
    told = {"a\n": [said, 3, None, True, "x" * 300, {"b": ["\t"]}]}
    assert printable(told) == {r"a\n": [shown, 3, None, True, "x" * 300, {"b": [r"\t"]}]}
