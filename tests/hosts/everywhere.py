"""Runs one command on every host at once: `everywhere.py host1,host2 COMMANDS_PER_HOST COMMAND...`.

`{node}`, `{local}` and `{rank}` in the command's words are replaced by numbers. Waits for all commands, and exits with
the first status that is not zero.
"""

import shlex
import subprocess
import sys


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
    statuses = [process.wait() for process in started]
    sys.exit(next((status for status in statuses if status), 0))


if __name__ == "__main__":
    main()
