"""Loaded by every Python process that a test launches: SIGUSR1 writes its stacks to a file.

`tests.launch` puts this directory on PYTHONPATH, and signals only processes whose file exists, because SIGUSR1 kills
any other. faulthandler does not need the GIL, so a rank that is stuck in MPI or another native call answers too.
"""

import faulthandler
import os
import signal

_directory = os.environ.get("TEST_STACKS")
if _directory and hasattr(signal, "SIGUSR1"):
    _name = f"{os.stat('/proc/self/ns/pid').st_ino}-{os.getpid()}.txt"  # ids repeat between test hosts
    _stacks = open(os.path.join(_directory, _name), "w")  # noqa: SIM115 - lives as long as the process
    faulthandler.register(signal.SIGUSR1, file=_stacks, all_threads=True)
