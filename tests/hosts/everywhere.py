"""Runs one command on every host at once: `everywhere.py host1,host2 COMMANDS_PER_HOST COMMAND...`.

`{node}`, `{local}` and `{rank}` in the command's words are replaced by numbers. Waits for all commands, and exits with
the first status that is not zero. With TEST_KILL_ON_BAD_EXIT=1 the others end as soon as one has another status, as
srun's tasks do.
"""

import os
import shlex
import subprocess
import sys
import time


def main():
    hosts, per_host, command = sys.argv[1].split(","), int(sys.argv[2]), sys.argv[3:]
    started = []
    for node, host in enumerate(hosts):
        for local in range(per_host):
            numbers = {"{node}": node, "{local}": local, "{rank}": node * per_host + local}
            words = command
            for name, number in numbers.items():
                words = [word.replace(name, str(number)) for word in words]
            started.append(subprocess.Popen(["ssh", host, shlex.join(words)], stdin=subprocess.DEVNULL))
    is_strict = os.environ.get("TEST_KILL_ON_BAD_EXIT")
    while is_strict and any(process.poll() is None for process in started):
        if any(process.returncode for process in started):
            for process in started:
                process.terminate()
        time.sleep(0.05)
    statuses = [process.wait() for process in started]
    sys.exit(next((status for status in statuses if status), 0))


if __name__ == "__main__":
    main()
