"""One command on every host at once: `everywhere.py host1,host2 PER_HOST COMMAND...`.

`{node}`, `{local}` and `{rank}` in the command's words become numbers. Ends with the first status that is not
zero, after all have ended.
"""

import shlex
import subprocess
import sys


def main():
    hosts, each, command = sys.argv[1].split(","), int(sys.argv[2]), sys.argv[3:]
    started = []
    for node, host in enumerate(hosts):
        for local in range(each):
            numbers = {"{node}": node, "{local}": local, "{rank}": node * each + local}
            words = command
            for name, number in numbers.items():
                words = [word.replace(name, str(number)) for word in words]
            started.append(subprocess.Popen(["ssh", host, shlex.join(words)], stdin=subprocess.DEVNULL))
    sys.exit(next((status for status in [process.wait() for process in started] if status), 0))


if __name__ == "__main__":
    main()
