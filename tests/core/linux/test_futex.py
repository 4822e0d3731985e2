"""Sleeping on a word of shared memory."""

from __future__ import annotations

import os
import threading
import time

import numpy as np

from ring_plugins.core.linux import futex
from ring_plugins.core.linux.shared_memory import Segment


def test_another_process_wakes_a_sleeper() -> None:
    segment = Segment.create(4096)
    words = segment.array.view(np.int64)
    child = os.fork()
    if not child:  # says that it sleeps, sleeps until it is woken, and says that it woke
        words[1] = 1
        while words[0] == 0:
            futex.sleep_while(segment.array.ctypes.data, 0, 30.0)
        words[1] = 2
        os._exit(0)
    while words[1] == 0:
        time.sleep(0.001)
    time.sleep(0.05)
    words[0] = 1
    started = time.monotonic()
    futex.wake(segment.array.ctypes.data)
    _, status = os.waitpid(child, 0)
    assert status == 0 and words[1] == 2
    assert time.monotonic() - started < 25.0  # and did not sleep to the end


def test_a_word_that_has_changed_is_not_slept_on() -> None:
    word = np.array([2**40 + 5])
    started = time.monotonic()
    futex.sleep_while(word.ctypes.data, 4, 30.0)
    assert time.monotonic() - started < 25.0


def test_a_sleep_times_out_and_lets_other_threads_run() -> None:
    word, ran = np.array([3]), threading.Event()
    thread = threading.Thread(target=ran.set)
    thread.start()
    futex.sleep_while(word.ctypes.data, 3, 0.05)
    thread.join()
    assert ran.is_set()
