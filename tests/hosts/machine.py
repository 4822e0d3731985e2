"""The first process of a test host: it names the host, mounts what is the host's own, and lets others log in.

Runs as `python -IS machine.py NAME HOSTS_FILE` inside fresh namespaces, as process 1 of the host. When it ends, and
it ends when its standard input is closed, the kernel ends every process of the host and drops its interfaces.

Logging in is a stand-in for sshd on port 22, over the host's real (shaped, blocked, missing) network, without any
secret: `login.py` sends one line of JSON `{"command", "environment", "directory"}` and then frames of standard input;
frames of standard output and error and the exit status come back. A command is ended when its client goes away.
"""

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading

GREETING = b"ring test host\n"
OUTPUT, ERROR, STATUS, INPUT = range(4)


def send_frame(connection, kind, data):
    connection.sendall(struct.pack("!BI", kind, len(data)) + data)


def receive_frame(stream):
    """(kind, data), or None at the end."""
    head = stream.read(5)
    if len(head) < 5:
        return None
    kind, length = struct.unpack("!BI", head)
    data = stream.read(length)
    return (kind, data) if len(data) == length else None


def become(name, hosts_file):
    socket.sethostname(name)
    mounts = [["--make-rprivate", "/"], ["-t", "sysfs", "sysfs", "/sys"], ["-t", "tmpfs", "tmpfs", "/dev/shm"]]
    for mount in [*mounts, ["--bind", hosts_file, "/etc/hosts"]]:
        subprocess.run(["mount", *mount], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def serve(connection):
    with connection, contextlib.suppress(OSError):
        connection.sendall(GREETING)
        stream = connection.makefile("rb")
        line = stream.readline()
        if not line:
            return
        wanted = json.loads(line)
        process = subprocess.Popen(
            ["/bin/sh", "-c", wanted["command"]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=wanted["environment"],
            cwd=wanted["directory"],
            start_new_session=True,
        )
        lock = threading.Lock()

        def forward(kind, source):
            with contextlib.suppress(OSError):
                while data := source.read1(65536):
                    with lock:
                        send_frame(connection, kind, data)

        def listen():
            """Standard input; and the end of the client is a hang-up, as from a terminal that closes."""
            with contextlib.suppress(OSError, ValueError):
                while frame := receive_frame(stream):
                    if frame[1]:
                        process.stdin.write(frame[1])
                        process.stdin.flush()
                    else:
                        process.stdin.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGHUP)

        outputs = [
            threading.Thread(target=forward, args=pair, daemon=True)
            for pair in ((OUTPUT, process.stdout), (ERROR, process.stderr))
        ]
        for thread in (*outputs, threading.Thread(target=listen, daemon=True)):
            thread.start()
        status = process.wait()
        for thread in outputs:
            thread.join()
        send_frame(connection, STATUS, struct.pack("!i", status))


def main():
    name, hosts_file = sys.argv[1:]
    become(name, hosts_file)
    listener = socket.create_server(("", 22), backlog=64)

    def accept():
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    print("ready", flush=True)

    # Orphans come to process 1; they stay zombies, which nobody minds, until the host is gone.
    sys.stdin.read()


if __name__ == "__main__":
    main()
