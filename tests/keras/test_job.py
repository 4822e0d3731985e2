"""When a rank fails inside `fit`, every process ends within ten seconds and prints the first cause."""

import re
import signal

import pytest

from tests.keras.launches import START, environment
from tests.launch import Result, start_ranks

SECONDS = 10

SCRIPT = (
    START
    + """
import time
import keras
import numpy as np
from ring_plugins.keras import BroadcastCallback
from tests.worker import report_pid

def batches():
    for number in range(100000):
        if number == 3:
            report_pid()
            WHEN
        time.sleep(0.01)
        yield np.ones((4, 5), "float32"), np.ones((4, 1), "float32")

model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
model.compile(optimizer="sgd", loss="mse")
model.fit(batches(), steps_per_epoch=STEPS, epochs=2, verbose=0, callbacks=[BroadcastCallback(UNEVEN)])
"""
)


def on(*backends: str, slow: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "backend", [*backends, *(pytest.param(backend, marks=pytest.mark.slow) for backend in slow)]
    )


def script(when: str = "pass", steps: str = "100000", uneven: str = "") -> str:
    return SCRIPT.replace("WHEN", when).replace("STEPS", steps).replace("UNEVEN", uneven)


def ended(source: str, backend: str, *causes: str, interfere: signal.Signals | str | None = None) -> Result:
    with start_ranks(source, 2, env=environment(backend)) as job:
        job.pids(timeout=90)
        if interfere == "ctrl-c":
            job.interrupt()
        elif interfere is not None:
            job.send_signal(1, interfere)
        result = job.wait(SECONDS)
    assert result.returncode != 0, result
    for cause in causes:
        assert re.search(cause, result.output), f"nothing about {cause!r} in\n{result}"
    return result


@on("jax", slow=("tensorflow", "torch"))  # the peer's error passes through the framework's host call
def test_sigkill_of_a_rank(backend):
    ended(script(), backend, r"rank 1\b.*(died|killed|signal)", interfere=signal.SIGKILL)


@on("torch", slow=("tensorflow", "jax"))
def test_exception_on_one_rank(backend):
    raises = "if ring.rank() == 1: raise ValueError('the image is broken')"
    result = ended(script(raises), backend, "rank 1 failed", "ValueError: the image is broken")
    assert result.output.count("rank 0 ends because") == 1, result


@on("torch", slow=("tensorflow",))
def test_ctrl_c(backend):
    ended(script(), backend, "KeyboardInterrupt", interfere="ctrl-c")


@on(slow=("torch", "tensorflow"))  # tests/keras/test_validation.py has the error in each rank
def test_unequal_steps_of_a_generator(backend):
    """The length is not known in advance; the error is raised when one rank's epoch is over."""
    result = ended(
        script("if ring.rank() == 1: return", "None", "uneven='error'"),
        backend,
        r"different numbers of steps|amount of data",
    )
    assert re.search(r"rank [01]\b", result.output), result


def test_an_exception_that_the_framework_raises_itself_explains_no_later_one(monkeypatch):
    from ring_plugins.keras import job

    monkeypatch.setattr(job, "_captured", [])  # another test may have left one

    class OfFramework(RuntimeError):
        __module__ = "jaxlib"

    @job.capture_exceptions
    def fails():
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"), job.restore_exceptions():
        fails()
    later = OfFramework("later")
    assert job.restored(later) is later
    with pytest.raises(ValueError, match="first"):
        fails()
    assert str(job.restored(later)) == "first"
