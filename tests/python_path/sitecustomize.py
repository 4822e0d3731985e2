"""Loaded by every Python process that a test launches: SIGUSR1 writes its stacks to a file, and packages are hidden.

`tests.launch` puts this directory on PYTHONPATH, and signals only processes whose file exists, because SIGUSR1 kills
any other. faulthandler does not need the GIL, so a rank that is stuck in MPI or another native call answers too.
"""

import faulthandler
import os
import signal
import sys

_directory = os.environ.get("TEST_STACKS")
if _directory and hasattr(signal, "SIGUSR1"):
    _name = f"{os.stat('/proc/self/ns/pid').st_ino}-{os.getpid()}.txt"  # ids repeat between test hosts
    _stacks = open(os.path.join(_directory, _name), "w")  # noqa: SIM115 - lives as long as the process
    faulthandler.register(signal.SIGUSR1, file=_stacks, all_threads=True)

# Keras and Lightning import these where they are installed, for tools that hardly a test uses: a third to a half of the
# time in which they start.
_backend = os.environ.get("KERAS_BACKEND")
_hidden = {
    *os.environ.get("HIDDEN_PACKAGES", "jax matplotlib sklearn transformers" if _backend else "transformers").split()
} - {_backend}
if _hidden:
    import importlib.metadata

    def _distribution(name: str) -> importlib.metadata.Distribution:
        if name in _hidden:
            raise importlib.metadata.PackageNotFoundError(name)
        return importlib.metadata.Distribution.from_name(name)

    importlib.metadata.distribution = _distribution
    sys.modules.update(dict.fromkeys(_hidden))  # type: ignore[arg-type]
