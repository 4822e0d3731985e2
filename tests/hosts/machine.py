"""The first process of a test host: sets the host name, mounts the host's own file systems, and stands in for sshd.

Runs as `python -IS machine.py NAME HOSTS_FILE` in fresh namespaces, as process 1 of the host. It exits when its
standard input closes; the kernel then kills every process of the host and removes its interfaces.

The stand-in for sshd listens on port 22 of the host's network, so that shaping and firewalls affect it. It asks for no
secret. login.py sends one line of JSON (`command`, `environment`, `directory`) and frames of standard input; frames of
standard output, standard error and the exit status come back. The command is ended when its client disconnects.
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
    """Kind and data of the next frame, or None at the end of the stream."""
    head = stream.read(5)
    if len(head) < 5:
        return None
    kind, length = struct.unpack("!BI", head)
    data = stream.read(length)
    return (kind, data) if len(data) == length else None


def set_up(name, hosts_file):
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
        request = json.loads(line)
        process = subprocess.Popen(
            ["/bin/sh", "-c", request["command"]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=request["environment"],
            cwd=request["directory"],
            start_new_session=True,
        )
        lock = threading.Lock()

        def forward(kind, source):
            with contextlib.suppress(OSError):
                while data := source.read1(65536):
                    with lock:
                        send_frame(connection, kind, data)

        def read_input():
            """Forward standard input. When the client disconnects, hang up, as a closed terminal does."""
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
        for thread in (*outputs, threading.Thread(target=read_input, daemon=True)):
            thread.start()
        status = process.wait()
        for thread in outputs:
            thread.join()
        send_frame(connection, STATUS, struct.pack("!i", status))


def main():
    name, hosts_file = sys.argv[1:]
    set_up(name, hosts_file)
    listener = socket.create_server(("", 22), backlog=64)

    def accept():
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    print("ready", flush=True)

    # Orphans become children of this process and stay zombies until the host ends, which does no harm.
    sys.stdin.read()


if __name__ == "__main__":
    main()
