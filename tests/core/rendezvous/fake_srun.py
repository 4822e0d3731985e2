"""As `srun --kill-on-bad-exit=1` on one host: `fake_srun.py 3 python train.py` runs three tasks of a step.

`fake_srun.py 3@1/2 python train.py` runs those of host2 of two hosts, as SLURM's daemon there does.
"""

import os
import signal
import subprocess
import sys
import time

KILL_WAIT = 3.0


def main() -> int:
    how_many, command = sys.argv[1], sys.argv[2:]
    each, _, where = how_many.partition("@")
    node, nodes = map(int, (where or "0/1").split("/"))
    size = int(each)
    step = {
        "SLURM_JOB_ID": "78" if where else str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_NODEID": str(node),
        "SLURM_NTASKS": str(nodes * size),
        "SLURM_STEP_NUM_TASKS": str(nodes * size),
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_NODELIST": f"host[1-{nodes}]" if where else "localhost",
        "SLURM_JOB_NODELIST": "node[1-2]",  # of the allocation, which may be larger than the step
        "SLURM_STEP_TASKS_PER_NODE": f"{size}(x{nodes})" if where else str(size),
    }
    own = [{"SLURM_PROCID": str(node * size + local), "SLURM_LOCALID": str(local)} for local in range(size)]
    tasks = [subprocess.Popen(command, env={**os.environ, **step, **one}) for one in own]
    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: asked.append(number))
    signal.signal(signal.SIGUSR1, lambda number, _: send(tasks, number))
    end = 0.0
    while None in [task.poll() for task in tasks]:
        if not end and (asked or any(task.returncode for task in tasks)):
            end = time.monotonic() + KILL_WAIT
            send(tasks, signal.SIGTERM)
        if end and time.monotonic() > end:
            send(tasks, signal.SIGKILL)
        time.sleep(0.02)
    codes = [task.returncode if task.returncode >= 0 else 128 - task.returncode for task in tasks]
    return max(codes)


def send(tasks: list[subprocess.Popen[bytes]], number: int) -> None:
    for task in tasks:
        if task.poll() is None:
            task.send_signal(number)


if __name__ == "__main__":
    sys.exit(main())
