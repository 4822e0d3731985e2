"""A process that answers others of its user and host; the rest is in tests/launcher/test_growth.py."""

import os
import threading
import time

import pytest

from ring_plugins.core.net.auth import Disconnected
from ring_plugins.core.net.local_service import LocalService, connected, processes


@pytest.fixture
def echo():
    """A service of this process that answers in capitals, and hangs up after "end"."""
    service, over = LocalService("echo", 16), threading.Event()

    def poll():
        while not over.is_set():
            for number, request in service.poll():
                service.send(number, request.decode().upper())
                if request == b"end":
                    service.hang_up(number)
            time.sleep(0.002)

    polling = threading.Thread(target=poll)
    polling.start()
    yield service
    over.set()
    polling.join()
    service.close()


def test_a_process_is_found_by_what_it_answers_and_answers_many_times(echo):
    assert os.getpid() in processes("echo") and os.getpid() not in processes("other")
    frames = connected("echo", os.getpid(), 64, 20)
    for text in (b"a", b"b"):
        frames.say(text, 20)
        assert frames.receive(20) == text.upper()
    frames.say(b"end", 20)
    assert frames.receive(20) == b"END"
    with pytest.raises(Disconnected):
        frames.receive(20)
    frames.close()


def test_one_that_does_not_answer_is_none(echo):
    assert connected("other", os.getpid(), 64, 0.1) is None


def test_a_request_that_is_too_long_ends_the_connection_only(echo):
    for text, answer in ((b"x" * 17, None), (b"short", b"SHORT")):
        frames = connected("echo", os.getpid(), 64, 20)
        frames.say(text, 20)
        if answer is None:
            with pytest.raises(Disconnected):
                frames.receive(20)
        else:
            assert frames.receive(20) == answer
        frames.close()
