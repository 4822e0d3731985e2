"""What another connection to a process proves whose connection has ended."""

import socket
import threading
import time

from ring_plugins.core.control.listen_probe import ListenProbe


def found_by(probe, seconds=5.0):
    end = time.monotonic() + seconds
    while not (found := probe.advance()) and time.monotonic() < end:
        time.sleep(0.005)
    probe.close()
    return found


def test_a_process_that_does_not_listen_any_more_is_dead():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert found_by(ListenProbe("127.0.0.1", port, 5.0)) == "dead"


def test_one_that_answers_lives_and_one_that_does_not_is_not_dead_either():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        began = time.monotonic()
        assert found_by(ListenProbe("127.0.0.1", port, 0.2)) == "silent"  # as one that is stopped
        assert time.monotonic() - began >= 0.2
        listener.accept()[0].close()
        answers = threading.Thread(target=lambda: listener.accept()[0].send(b"r"))
        answers.start()
        assert found_by(ListenProbe("127.0.0.1", port, 5.0)) == "silent"
        answers.join()
