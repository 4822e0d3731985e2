"""The simulated CUDA, built once; without it the tests are skipped with the reason."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_rehearsal.build import REPOSITORY, Unavailable, build
from tests.launch import Launcher, Result, run_ranks

PROGRAMS = Path(__file__).with_name("programs")


@pytest.fixture(scope="session")
def variables() -> Mapping[str, str]:
    """Environment variables of a process on simulated devices."""
    try:
        return build()
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def rehearse(variables: Mapping[str, str]) -> Any:
    """Runs a program, of this folder if it is a name, on ranks that have a simulated device each.

    Further keyword arguments are settings: `lag=300` sets RING_SIMULATED_LAG.
    """

    def run(
        program: str | Path,
        *args: str,
        ranks: int = 2,
        check: bool = True,
        launcher: Launcher = "spawned",
        variables_too: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> Result:
        simulated = {f"RING_SIMULATED_{name.upper()}": str(value) for name, value in settings.items()}
        paths = os.pathsep.join([variables["PYTHONPATH"], str(REPOSITORY / "tests" / "python_path")])
        env = {**variables, "PYTHONPATH": paths, "RING_SIMULATED_DEVICES": str(max(ranks, 2)), **simulated}
        path = program if isinstance(program, Path) else PROGRAMS / f"{program}.py"
        env |= variables_too or {}
        unconnected = ["simulated-nccl-*"]  # of ranks that died while NCCL connected them
        return run_ranks(path, ranks, launcher, args, env, timeout=300, check=check, ignore_files=unconnected)

    return run
