import sys
import threading

from ring_plugins.core.linux.shared_memory import _publish_weakly_ordered


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
