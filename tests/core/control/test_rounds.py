"""What ranks have told in the rounds in which a process joins."""

import pytest

from ring_plugins.core.control.rounds import CALL, OFFERS, Rounds


def test_each_round_of_each_attempt_has_its_own_messages():
    rounds = Rounds()
    for view, number, sender in ((1, CALL, 0), (1, OFFERS, 0), (1, OFFERS, 2), (2, OFFERS, 0)):
        assert rounds.note(sender, {"view": view, "round": number, "payload": [view, number]})
    assert rounds.of(1, OFFERS) == {0: [1, OFFERS], 2: [1, OFFERS]}
    rounds.note(3, {"view": 1, "problem": "no memory"})
    rounds.note(4, {"view": 1, "problem": "late"})
    assert rounds.problems == {1: "no memory"}, "the first counts"
    rounds.forget(1)
    assert not rounds.note(5, {"view": 1, "round": OFFERS, "payload": "late"})
    assert not rounds.problems and not rounds.of(1, OFFERS) and rounds.of(2, OFFERS) == {0: [2, OFFERS]}


@pytest.mark.parametrize("body", [{"view": "1", "problem": "x"}, {"view": 1, "round": None, "payload": 0}, {"view": 1}])
def test_an_invalid_message_is_rejected(body):
    with pytest.raises((ValueError, TypeError, KeyError)):
        Rounds().note(0, body)
