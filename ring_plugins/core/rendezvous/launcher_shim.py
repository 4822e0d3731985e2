"""What a launcher's process becomes when `shim_setup.become_launcher_shim` has taken over its job: a process that must
not die.

Runs as a script of its own, by an isolated Python without site-packages, so that it takes 6 MB and no time; it imports
nothing of this package. All of a job's shims meet at an abstract Unix socket:

- the first listens. When all others have come, it starts `ring run`, whose exit status it sends to them in one byte;
- the others say in one line which they are and what they would have run, wait for that byte, and leave with it.

A shim that is asked to end (Ctrl-C, SIGTERM) closes its side of the connection, and so does one that is killed. The
first then ends the job. Each of them also looks twice a second whether the launcher is still there.

Any program of this host can reach an abstract socket, and take any name that is free. So only processes of the same
user are believed (SO_PEERCRED), and the name is random: the others find it, as one of their user's, in the kernel's
list of sockets, below a name that all of them know (`listen_below`, `connect_below`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator

#: Seconds between two looks at the launcher.
_LOOK_SECONDS = 0.5
#: Seconds for which a process that has connected may take to say who it is.
_LINE_SECONDS = 2.0
_END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Those to which scripts give a meaning of their own.
_USER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1
#: States of a process that has ended, though its parent has not asked how.
_ENDED = ("Z", "X")


def start_time(pid: int) -> str:
    """When a process started, in clock ticks: tells it from a later one of its number. "" if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in _ENDED else fields[19]


class Launcher:
    """The process that started the shims of a job.

    Args:
        pid: its process id.
        started: its `start_time`.
    """

    def __init__(self, pid: int, started: str) -> None:
        self._pid, self._started = pid, started

    def is_gone(self) -> bool:
        """Whether it has ended."""
        return start_time(self._pid) != self._started


def run_first_shim(name: str, size: int, digest: str, launcher: Launcher, timeout: float, command: list[str]) -> int:
    """Hold the first slot: wait for the others, run a command, and return its exit status, which all leave with.

    Args:
        name: below which the socket is.
        size: number of slots.
        digest: of the command; equal in all slots.
        launcher: of all slots.
        timeout: seconds for the others to come.
        command: to run.
    """
    with socket.socket(socket.AF_UNIX) as listener:
        listen_below(listener, name, size)
        others: dict[int, socket.socket] = {}
        deadline = time.monotonic() + timeout
        listener.settimeout(_LOOK_SECONDS)
        while len(others) < size - 1:
            if launcher.is_gone():
                return _ended_by(signal.SIGTERM)
            if time.monotonic() > deadline:
                missing = ", ".join(str(slot) for slot in range(1, size) if slot not in others)
                return _fail(
                    f'rank 0 waited {timeout:g} s for rank {missing} to reach init(on_failure="continue"), which all '
                    "ranks have to call. Set RING_START_TIMEOUT to wait longer."
                )
            with contextlib.suppress(TimeoutError):
                connection, _ = listener.accept()
                slot, theirs = _greeting(connection)
                if slot not in range(1, size) or slot in others:
                    connection.close()
                    continue
                others[slot] = connection
                if theirs != digest:
                    return _fail(
                        f"rank {slot} has another command, directory or min_ranks than rank 0, but with "
                        'on_failure="continue" all ranks run the command of rank 0: start all alike.'
                    )
    _use_all_cores(list(others.values()))
    status = _run(command, list(others.values()), launcher)
    for connection in others.values():
        with contextlib.suppress(OSError):
            connection.sendall(bytes([status]))
    return status


def run_other_shim(name: str, slot: int, digest: str, launcher: Launcher, timeout: float) -> int:
    """Hold another slot than the first: wait for the first's exit status, and return it.

    Args:
        name, digest, launcher, timeout: as for `run_first_shim`.
        slot: which this is, from 1.
    """
    deadline = time.monotonic() + timeout
    while (connection := connect_below(name)) is None:
        if launcher.is_gone():
            return _ended_by(signal.SIGTERM)
        if time.monotonic() > deadline:
            return _fail(
                f'rank {slot} waited {timeout:g} s for rank 0 to reach init(on_failure="continue"), which all ranks '
                "have to call. Set RING_START_TIMEOUT to wait longer."
            )
        time.sleep(0.02)
    with connection:
        connection.settimeout(_LOOK_SECONDS)

        def ask_to_end(*_: object) -> None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)

        for number in _heeded(_END_SIGNALS):
            signal.signal(number, ask_to_end)
        with contextlib.suppress(OSError):
            connection.sendall(f"{slot} {digest}\n".encode())
        while not launcher.is_gone():
            try:
                status = connection.recv(1)
            except TimeoutError:
                continue
            except OSError:
                status = b""
            return status[0] if status else 1  # the first slot has died: the launcher says how
    return _ended_by(signal.SIGTERM)


def listen_below(listener: socket.socket, name: str, backlog: int) -> None:
    """Listen in Linux's abstract namespace at a random name below this one, which nobody can take first."""
    listener.bind(f"\0{name}/{os.urandom(8).hex()}")
    listener.listen(backlog)


def connect_below(name: str, seconds: float = 0.0) -> socket.socket | None:
    """A connection to a process of this user that listens below a name, None if there is none.

    Args:
        name: as for `listen_below`.
        seconds: to wait if too many others wait to be accepted.
    """
    deadline = time.monotonic() + seconds
    while True:
        is_full = False
        for one in names_below(re.escape(name)):
            try:
                if (connection := connect_to(one)) is not None:
                    return connection
            except BlockingIOError:
                is_full = True
        if not is_full or time.monotonic() > deadline:
            return None
        time.sleep(0.02)


def names_below(name: str) -> list[str]:
    """The names of sockets, anybody's, below a name, which is a regular expression."""
    with contextlib.suppress(OSError), open("/proc/net/unix", errors="replace") as table:
        found = re.findall(f"@({name}/[0-9a-f]{{16}})$", table.read(), re.MULTILINE)
        return list(dict.fromkeys(found))  # the kernel lists accepted connections, too
    return []


def connect_to(name: str) -> socket.socket | None:
    """A connection to the socket of this name, None if it is not this user's, or gone.

    Raises:
        BlockingIOError: too many others wait to be accepted.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.setblocking(False)
    try:
        connection.connect(f"\0{name}")
        if _peer(connection)[1] == os.geteuid():
            connection.settimeout(_LINE_SECONDS)
            return connection
    except BlockingIOError:
        connection.close()
        raise
    except OSError:
        pass  # it has ended
    connection.close()
    return None


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Process id and user of the process at the other end, as the kernel says."""
    pid, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, user


def _greeting(connection: socket.socket) -> tuple[int, str]:
    """The slot and the digest that the process at the other end tells, (0, "") if it is none of the shims."""
    if _peer(connection)[1] != os.geteuid():
        return 0, ""
    line = b""
    connection.settimeout(_LINE_SECONDS)
    with contextlib.suppress(OSError):
        while len(line) < 64 and not line.endswith(b"\n") and (data := connection.recv(64 - len(line))):
            line += data
    found = re.fullmatch(rb"(\d{1,6}) ([0-9a-f]{16})\n", line)
    return (int(found[1]), found[2].decode()) if found else (0, "")


def _use_all_cores(others: list[socket.socket]) -> None:
    """Let the ranks run on all cores that the launcher has bound any of these processes to."""
    with contextlib.suppress(OSError, AttributeError):
        allowed = [os.sched_getaffinity(_peer(connection)[0]) for connection in others]
        os.sched_setaffinity(0, os.sched_getaffinity(0).union(*allowed))


def _run(command: list[str], others: list[socket.socket], launcher: Launcher) -> int:
    """Run a command, which ends when the launcher does or a shim asks for it, and return its exit status."""
    import subprocess

    waking, wakes = socket.socketpair()
    waking.setblocking(False)
    wakes.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    end_signals = set(_heeded(_END_SIGNALS))
    for handled in (signal.SIGCHLD, *end_signals, *_heeded(_USER_SIGNALS)):
        signal.signal(handled, lambda *_: None)
    library = ctypes.CDLL(None)

    def before_exec() -> None:
        library.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        for user_signal in _USER_SIGNALS:  # launchers may send them to all that run under them, for the ranks to heed
            signal.signal(user_signal, signal.SIG_IGN)

    process = subprocess.Popen(command, preexec_fn=before_exec)  # noqa: PLW1509 - there is one thread
    poll = select.poll()
    for heard in (waking, *others):
        poll.register(heard, select.POLLIN)
    while process.poll() is None:
        ready = [descriptor for descriptor, _ in poll.poll(_LOOK_SECONDS * 1e3)]
        signals: set[int] = set()
        if waking.fileno() in ready:
            ready.remove(waking.fileno())
            with contextlib.suppress(BlockingIOError):
                signals.update(waking.recv(4096))
        for number in signals.intersection(_USER_SIGNALS):
            for rank in _children(process.pid):
                with contextlib.suppress(OSError):
                    os.kill(rank, number)
        if asked := signals & end_signals:
            process.send_signal(min(asked))
        elif ready or launcher.is_gone():
            process.terminate()
            for descriptor in ready:
                poll.unregister(descriptor)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _children(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{pid}/children") as file:
        yield from map(int, file.read().split())


def _heeded(numbers: tuple[signal.Signals, ...]) -> list[signal.Signals]:
    """Those that this process does not ignore, as nohup has it ignore SIGHUP."""
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


def _ended_by(number: signal.Signals) -> int:
    return 128 + number


def _fail(text: str) -> int:
    print(f"ring_plugins: {text}", file=sys.stderr)
    return 1


def _main(role: str, name: str, number: str, digest: str, pid: str, started: str, timeout: str, *command: str) -> int:
    launcher = Launcher(int(pid), started)
    if role == "first":
        return run_first_shim(name, int(number), digest, launcher, float(timeout), list(command))
    for user_signal in _USER_SIGNALS:  # the first hands them to the ranks
        signal.signal(user_signal, signal.SIG_IGN)
    return run_other_shim(name, int(number), digest, launcher, float(timeout))


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
