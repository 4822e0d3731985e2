"""Coordinators of a job on two hosts, whose supervisors tests play."""

import threading

from ring_plugins.launcher.coordinator import Coordinator
from ring_plugins.launcher.coordinator_link import HostJob
from ring_plugins.launcher.processes import Processes


class Logins:
    """Starts nothing, but knows which hosts were to be started."""

    def __init__(self, code=None, problems=lambda host, report: []):
        self.code, self.problems, self.started, self.ended = code, problems, [], 0

    def start(self, port, key, host, index, ranks, is_added):
        self.started.append((host, index))
        return self

    def poll(self):
        return self.code

    def terminate(self):
        self.ended += 1


def coordinator(notify=lambda text: None, most=0, logins=None, **options):
    hosts = [("host1", [0, 1]), ("me@host2", [2, 3])]
    return Coordinator(hosts, Processes(), notify, 0, most=most, takes_requests=True, logins=logins, **options)


def job(of, index=0, addresses=("127.0.0.1",)):
    return HostJob(addresses, of.port, of.key, index, 2, [0, 1], 4, ["true"])


class Polled:
    """A coordinator that hears its supervisors, in a thread."""

    def __init__(self, most=0, logins=None):
        self.told = []
        self.coordinator = coordinator(self.told.append, most, logins)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        while not self._done.is_set():
            self.coordinator._poll(0.05)

    def __enter__(self):
        self._thread.start()
        return self

    def stop(self):
        self._done.set()
        self._thread.join()

    def __exit__(self, *_):
        self.stop()
        self.coordinator.__exit__()
