import os
import sys
import threading

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
    standard_input = os.dup(0)
    os.close(0)
    try:
        segment = Segment.create(10)
    finally:
        os.dup2(standard_input, 0)
        os.close(standard_input)
    assert segment.fd > 2
