"""Launches that tests share: starting a framework takes longer than most behaviors.

A test names the behavior it looks at by `on_ranks`, and gets what the ranks returned as `seen`. The first test that
needs a backend, on a number of ranks, starts one launch for all behaviors that the selected tests name on these. So a
full run has one launch for each backend and number of ranks, and `pytest tests/keras -k NAME` runs NAME only.
"""

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest

from tests.launch import LaunchFailed, Result, run_ranks

BACKENDS = ("tensorflow", "torch", "jax")
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "TF_NUM_INTRAOP_THREADS": "1", "JAX_PLATFORMS": "cpu"}
# Small models are compiled to run a few steps: without optimizing, XLA takes two thirds of the time.
QUICK = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}

# Ranks that exist before Keras is imported import it at the same time.
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
    """The parameter `seen` of a test; `tests/conftest.py` knows by its id which tests share a launch."""
    marks = [pytest.mark.slow] if slow else []
    return pytest.param(Case(backend, ranks, name), id=f"on-{backend}-{ranks}{more}", marks=marks)


def on_ranks(name: str, *backends: str, slow: Iterable[str] = ()) -> pytest.MarkDecorator:
    """Give a test what each of two ranks returned from a behavior, as `seen`.

    Args:
        name: of a behavior in `tests/keras/behaviors`.
        *backends: on which it runs by default: the cheapest (torch), and others only if it depends on the backend.
        slow: further backends, for `pytest -m slow`.
    """
    cases = [case(backend, 2, name) for backend in backends] + [case(b, 2, name, slow=True) for b in slow]
    return pytest.mark.parametrize("seen", cases, indirect=True)


def environment(backend: str, **more: str) -> dict[str, str]:
    return {"KERAS_BACKEND": backend, **QUIET, **QUICK, **more}


@functools.cache
def launch(backend: str, ranks: int, names: tuple[str, ...]) -> Result | LaunchFailed:
    """Run behaviors and scenarios in one launch; a failure too is kept, for every test that wants a result of it."""
    script = START + "from tests.keras.worker import main\nmain()\n"
    try:
        return run_ranks(script, ranks, env=environment(backend, TEST_ONLY=",".join(names)), timeout=850)
    except LaunchFailed as failure:
        return failure
