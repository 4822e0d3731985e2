"""Share launches among tests, because starting a framework takes longer than most behaviors.

A test names its behavior with `on_ranks`, and gets the results of the ranks as `seen`. The first test that needs a
backend and a number of ranks starts one launch for all behaviors that the selected tests need there. So a full run has
one launch per backend and number of ranks, and `pytest tests/keras -k NAME` runs only NAME.
"""

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest

from tests.launch import LaunchFailed, Result, run_ranks

BACKENDS = ("tensorflow", "torch", "jax")
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "TF_NUM_INTRAOP_THREADS": "1", "JAX_PLATFORMS": "cpu"}
# Small models run only a few steps: without optimization, XLA takes two thirds of the time.
QUICK = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}

# Ranks are started before the import of Keras, so that they import it at the same time.
START = """
import os
import ring_plugins as ring

ring.init(ranks=int(os.environ["TEST_RANKS"]))
"""


class Case(NamedTuple):
    """A behavior or scenario on a backend and a number of ranks."""

    backend: str
    ranks: int
    name: str


def case(backend: str, ranks: int, name: str, more: str = "", slow: bool = False) -> Any:
    """The parameter `seen` of a test; `tests/conftest.py` recognizes tests that share a launch by its id."""
    marks = [pytest.mark.slow] if slow else []
    return pytest.param(Case(backend, ranks, name), id=f"on-{backend}-{ranks}{more}", marks=marks)


def on_ranks(name: str, *backends: str, slow: Iterable[str] = ()) -> pytest.MarkDecorator:
    """Pass the results of a behavior on two ranks to a test, as `seen`.

    Args:
        name: name of a behavior in `tests/keras/behaviors`.
        *backends: backends on which it runs by default: torch, the cheapest, and others only if it depends on them.
        slow: backends on which it runs with `pytest -m slow`.
    """
    cases = [case(backend, 2, name) for backend in backends] + [case(b, 2, name, slow=True) for b in slow]
    return pytest.mark.parametrize("seen", cases, indirect=True)


def environment(backend: str, **more: str) -> dict[str, str]:
    return {"KERAS_BACKEND": backend, **QUIET, **QUICK, **more}


@functools.cache
def launch(backend: str, ranks: int, names: tuple[str, ...], attempt: int) -> Result | LaunchFailed:
    """Run behaviors and scenarios in one launch. A failure is cached too, for every test that needs the launch.

    Args:
        backend: of Keras.
        ranks: number of ranks.
        names: of the behaviors and scenarios.
        attempt: 1, or which attempt this is of a test that failed; another attempt is another launch.
    """
    script = START + "from tests.keras.worker import main\nmain()\n"
    try:
        return run_ranks(script, ranks, env=environment(backend, TEST_ONLY=",".join(names)), timeout=850)
    except LaunchFailed as failure:
        return failure
