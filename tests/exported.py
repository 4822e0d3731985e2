"""A launcher that only exports torchrun's variables: `python exported.py RANKS SCRIPT ARGUMENT...`.

torchrun and the ranks that meet through its store import torch, four seconds of CPU for two ranks. Tests of virtual
nodes, and of ranks that nobody of ours has started, need the variables only. With TEST_MORTAL, ranks outlive others.
"""

import os
import socket
import subprocess
import sys
import time


def main() -> int:
    ranks, *script = sys.argv[1:]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    shared = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [
        subprocess.Popen([sys.executable, *script], env={**os.environ, **shared, "RANK": str(i), "LOCAL_RANK": str(i)})
        for i in range(int(ranks))
    ]
    is_mortal = "TEST_MORTAL" in os.environ
    while None in (codes := [process.poll() for process in started]) and (is_mortal or not any(codes)):
        time.sleep(0.1)
    for process in started:
        process.terminate()  # nothing happens to those that have ended; one that has failed ends the others
    return max(process.wait() != 0 for process in started)


if __name__ == "__main__":
    sys.exit(main())
