"""Making our strategies known to Lightning, and opening two doors that it keeps closed to strategies of others."""

from typing import Any

from ring_plugins.core.rendezvous import detect

NAMES = {
    "ring": {},
    "ring_fork": {"start_method": "fork"},
    "ring_notebook": {"start_method": "fork"},
}


def register(strategy: type, registry: Any) -> None:
    """Enter `strategy` into a ``StrategyRegistry`` under its names. Lightning has no entry points for this."""
    for name, arguments in NAMES.items():
        registry.register(name, strategy, description=f"{strategy.__name__}({arguments})", override=True, **arguments)


def allow_compiled_modules(strategy: type, single_device_strategy: Any) -> None:
    """Let ``trainer.fit(torch.compile(model))`` accept `strategy`.

    Lightning 2.6.6, pytorch/utilities/compile.py:118, asks for an instance of ``SingleDeviceStrategy``, ``DDPStrategy``
    or ``FSDPStrategy``, and asks nowhere else in the pytorch package for the first. That is also what is true of
    ours where it matters to the compiler: this process drives one device and the module is not wrapped. Being taken
    for ``DDPStrategy`` would claim a wrapper that is not there, and distribution at world size 1.
    """
    single_device_strategy.register(strategy)


def look_before_starting_mpi(mpi_environment: Any) -> None:
    """Let Lightning find out that there is no mpirun without starting MPI.

    Lightning 2.6.6, fabric/plugins/environments/mpi.py:82: where mpi4py is installed, every ``Trainer`` whose strategy
    is given by name (``"ring"`` too) asks MPI for its number of ranks, which initialises it. That takes a moment, fails
    with RuntimeError where mpi4py finds no libmpi, and with Open MPI 5.0 leaves 16 MiB in /dev/shm for each process.
    A process that no MPI launcher has started is alone for MPI, so the answer is known; others are asked as before.
    """
    asks_mpi = mpi_environment.detect

    def is_started_by_mpi() -> bool:
        return detect().kind == "mpi" and asks_mpi()

    mpi_environment.detect = staticmethod(is_started_by_mpi)
