from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

from ring_plugins.core.base.errors import SharedMemoryError
from ring_plugins.core.linux import shared_memory
from ring_plugins.core.linux.shared_memory import Segment, _publish_weakly_ordered


def test_threads_fence_at_the_same_time():
    errors = []

    def fence():
        try:
            for _ in range(2000):
                _publish_weakly_ordered()
        except RuntimeError as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=fence, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    finally:
        sys.setswitchinterval(interval)
    assert not errors
    assert not any(thread.is_alive() for thread in threads)


def test_a_segments_file_never_takes_the_number_of_a_closed_standard_stream():
    code = """
        import os
        from ring_plugins.core.linux.shared_memory import Segment
        os.close(0)
        assert Segment.create(10).fd > 2
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)  # not here, where other threads run


def test_a_file_that_took_the_number_of_a_closed_segment_is_not_mapped(tmp_path):
    segment = Segment.create(10)
    address = segment.address
    with open(tmp_path / "other", "wb+") as other:
        os.dup2(other.fileno(), segment.fd)
        for nbytes in (0, 10):
            other.truncate(nbytes)
            with pytest.raises(SharedMemoryError, match="another file"):
                Segment.open(address, 1)


def test_programs_do_not_inherit_a_segment_that_was_passed_on():
    segment = Segment.create(10)
    os.set_inheritable(segment.fd, True)  # as pass_fds does in a child
    other = Segment.inherited(segment.fd, 10)
    segment.fd = -1
    assert os.system(f"test -e /proc/self/fd/{other.fd}")
    assert other.array.size == 10


def test_a_forked_child_has_a_copy_of_its_own_and_no_access_to_the_others():
    own, others = Segment.create(100_000), Segment.create(100)
    shared, others_shared = own.array, others.array
    shared[:], others_shared[:] = 7, 7
    own.own_copy_in_children()
    others.hide_from_children()
    del own, others  # views keep the memory
    parent_is_done, done = os.pipe()
    said, say = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.read(parent_is_done, 1)
            seen = sorted(set(shared.tolist()))
            shared[:] = 9
            os.write(say, f"{seen} {set(shared.tolist())}".encode())
            if os.fork() == 0:  # a grandchild has ordinary memory
                os.write(say, f" {set(shared.tolist())}".encode())
                os._exit(0)
            os.wait()
            try:
                os.write(say, others_shared)
            except OSError as error:  # Python's own access would end the child
                os.write(say, f" {error.strerror}".encode())
        finally:
            os._exit(3)
    shared[:] = 8
    os.write(done, b"x")
    status = os.waitpid(child, 0)[1]
    assert os.waitstatus_to_exitcode(status) == 3
    assert os.read(said, 1000) == b"[7] {9} {9} Bad address"
    assert set(shared.tolist()) == {8} and set(others_shared.tolist()) == {7}
    for fd in (parent_is_done, done, said, say):
        os.close(fd)


def test_another_process_wakes_a_sleeper() -> None:
    segment = Segment.create(4096)
    words = segment.array.view(np.int64)
    child = os.fork()
    if not child:  # says that it sleeps, sleeps until it is woken, and says that it woke
        words[1] = 1
        while words[0] == 0:
            shared_memory.sleep_while(segment.array.ctypes.data, 0, 30.0)
        words[1] = 2
        os._exit(0)
    while words[1] == 0:
        time.sleep(0.001)
    time.sleep(0.05)
    words[0] = 1
    started = time.monotonic()
    shared_memory.wake(segment.array.ctypes.data)
    _, status = os.waitpid(child, 0)
    assert status == 0 and words[1] == 2
    assert time.monotonic() - started < 25.0  # and did not sleep to the end


def test_a_word_that_has_changed_is_not_slept_on() -> None:
    word = np.array([2**40 + 5])
    started = time.monotonic()
    shared_memory.sleep_while(word.ctypes.data, 4, 30.0)
    assert time.monotonic() - started < 25.0


def test_a_sleep_times_out_and_lets_other_threads_run() -> None:
    word, ran = np.array([3]), threading.Event()
    thread = threading.Thread(target=ran.set)
    thread.start()
    shared_memory.sleep_while(word.ctypes.data, 3, 0.05)
    thread.join()
    assert ran.is_set()
