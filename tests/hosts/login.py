"""Stands in for ssh on test hosts: `ssh [options] HOST COMMAND...`, over the network of the host that it runs on.

Runs as `python -IS login.py ARGUMENTS` and talks to machine.py on the other host. Like ssh, it gives the command a
fresh environment (plus the variables of the test harness) and joins its words with spaces for the remote shell. It
exits with the command's status, or with 255 after an error in ssh's words if it cannot connect.
"""

import json
import os
import signal
import socket
import struct
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from machine import ERROR, GREETING, INPUT, STATUS, receive_frame, send_frame

#: Options of ssh that take a value.
WITH_VALUE = "BbcDEeFIiJLlmOopQRSWw"
#: Prefixes of the variables that all hosts share, as hosts with the same installation would.
SHARED = ("TEST_", "PYTHON", "OMP_NUM_THREADS", "TMPDIR", "HOME", "LANG", "OMPI_ALLOW", "PRTE_ALLOW", "COVERAGE")


def parse(arguments):
    timeout = 10.0
    words = list(arguments)
    while words and words[0].startswith("-"):
        option = words.pop(0)
        if option[1] in WITH_VALUE:
            value = option[2:] or words.pop(0)
            if option[1] == "o" and value.lower().startswith("connecttimeout"):
                timeout = float(value.replace("=", " ").split()[1])
    if len(words) < 2:
        sys.exit("ssh: the stand-in of the tests needs a host and a command")
    return words[0].rpartition("@")[2], " ".join(words[1:]), timeout


def exit_unconnected(host, error):
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    if isinstance(error, socket.gaierror):
        print(f"ssh: Could not resolve hostname {host}: {reason}", file=sys.stderr)
    else:
        reason = "Connection timed out" if isinstance(error, TimeoutError) else reason
        print(f"ssh: connect to host {host} port 22: {reason}", file=sys.stderr)
    sys.exit(255)


def main():
    host, command, timeout = parse(sys.argv[1:])
    try:
        connection = socket.create_connection((host, 22), timeout)
    except OSError as error:
        exit_unconnected(host, error)
    connection.settimeout(None)
    stream = connection.makefile("rb")
    if stream.readline() != GREETING:
        sys.exit("ssh: the other side is not a test host")
    environment = {name: value for name, value in os.environ.items() if name.startswith(SHARED)}
    environment["PATH"] = os.environ["TEST_HOSTS_PATH"]
    request = {"command": command, "environment": environment, "directory": os.environ.get("HOME", "/")}
    connection.sendall(json.dumps(request).encode() + b"\n")

    def forward_input():
        while data := os.read(0, 65536):
            send_frame(connection, INPUT, data)
        send_frame(connection, INPUT, b"")

    threading.Thread(target=forward_input, daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda number, _: os._exit(128 + number))
    while frame := receive_frame(stream):
        kind, data = frame
        if kind == STATUS:
            status = struct.unpack("!i", data)[0]
            os._exit(status if status >= 0 else 128 - status)
        os.write(2 if kind == ERROR else 1, data)
    print(f"Connection to {host} closed by remote host.", file=sys.stderr, flush=True)
    os._exit(255)


if __name__ == "__main__":
    main()
