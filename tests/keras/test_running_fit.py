"""A `fit` that ends by an exception on one rank, which the script catches: all ranks get an error, none trains on.

Nobody may step on old averages or wait for ever, and a later `fit` works on all ranks alike.
"""

import re

import keras
import pytest

from ring_plugins.keras.running_fit import enclosing_list
from tests.keras.launches import BACKENDS, START, environment
from tests.launch import run_ranks

SCRIPT = (
    START
    + """
import gc
import signal
import sys
import threading
import time
from pathlib import Path

import keras
import numpy as np

from ring_plugins.core.gradients.fusion import BucketSizes, Entry
from ring_plugins.keras import BroadcastCallback, DistributedOptimizer
from ring_plugins.keras.buckets import HostBuckets
from tests.worker import report

RANK = ring.rank()
BACKEND = keras.backend.backend()
KINDS = os.environ.get("TEST_KINDS", "callback,data,signal,cut,own,alone").split(",")


class TimeIsUp(Exception):
    pass


class Interferes(keras.callbacks.Callback):
    # Rank 0 begins the third step and is interrupted there; rank 1 begins it when that has happened, or cannot yet.
    def __init__(self, kind):
        super().__init__()
        self.kind, self.file, self.steps = kind, Path(os.environ["TEST_REPORTS"]) / kind, 0

    def on_train_batch_begin(self, batch, logs=None):
        if batch != 2:
            return
        if self.kind == "signal" and RANK == 0:
            signal.signal(signal.SIGUSR1, self.handle)
            threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGUSR1)).start()
        elif self.kind == "signal":
            until = time.monotonic() + 2  # TensorFlow and JAX let no handler run while a step waits
            while not self.file.exists() and time.monotonic() < until:
                time.sleep(0.01)
        elif self.kind in ("callback", "own", "alone") and RANK == 0:
            raise TimeIsUp("in a callback")

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1

    def handle(self, *_):
        self.file.touch()
        raise TimeIsUp("in a handler")


def batches(kind):
    for number in range(6):
        if kind == "data" and number == 2 and RANK == 0:
            raise MemoryError("no room for a batch")
        yield np.full((4, 5), RANK + number + 1, "float32"), np.ones((4, 1), "float32")


def network(kind=""):
    own = kind in ("own", "alone")
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.001, momentum=0.9)
    model.compile(optimizer=DistributedOptimizer(optimizer) if own else optimizer, loss="mse")
    model.is_alone = kind == "alone"  # without BroadcastCallback: equal weights by equal seeds
    return model


def fit(model, kind, *callbacks):
    own = [] if getattr(model, "is_alone", False) else [BroadcastCallback()]
    model.fit(batches(kind), steps_per_epoch=6, verbose=0, callbacks=[*callbacks, *own])


def cut_off():
    # TensorFlow gives a step's buckets in several calls. An exception in between, in another branch of the graph, may
    # leave some of them sent.
    entries = [Entry(f"entry {i}", "float32", 4) for i in range(2)]
    buckets = HostBuckets(entries, ring.core.world.current().new_communicator("cut"), BucketSizes(16, 16))
    order = [entry for bucket in buckets.plan.buckets for entry in bucket.entries]
    assert len(buckets.plan.buckets) == 2
    for entry in [order[0], *order] if RANK == 0 else order:
        buckets.give([entry], [np.full(4, RANK + entry, "float32")])
    buckets.finish()


for kind in KINDS:
    model = network(kind)
    if kind == "alone":
        fit(model, "")  # the interrupted fit runs a step that is compiled already
    interferes = Interferes(kind)
    found = {"error": ""}
    try:
        fit(model, kind, interferes) if kind != "cut" else cut_off()
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
    report(kind, found)
    if BACKEND == "jax":
        model = network(kind)  # Keras may leave a model without weights
    fit(model, "")
    report(f"{kind}, again", [value.tolist() for value in model.get_weights()])

del model, interferes
gc.collect()
report("left", sum(isinstance(one, HostBuckets) for one in gc.get_objects()))


class Exits(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if batch == 1 and RANK == 1:
            sys.exit(4)


try:
    fit(network(), "", Exits())
except Exception as error:
    report("exits", f"{type(error).__name__} {error}")
    raise
"""
)


CAUSES = {
    "callback": "TimeIsUp: in a callback",
    "own": "TimeIsUp: in a callback",
    "alone": "TimeIsUp: in a callback",
    "data": "MemoryError: no room",
    "signal": "TimeIsUp: in a handler",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", [pytest.param(one, marks=[] if one == "jax" else pytest.mark.slow) for one in BACKENDS]
)
def test_all_ranks_get_an_error_and_fit_again_until_a_rank_exits(backend):
    result = run_ranks(SCRIPT, 2, env=environment(backend), timeout=150, check=False)
    for kind, cause in CAUSES.items():
        first, second = (found["error"] for found in result.values(kind))
        assert cause in first
        assert re.search(r"rank 0 .*(an exception ended fit\(\)|was interrupted in )", second), second
        first, second = result.values(f"{kind}, again")
        assert first == second, kind
    assert result.values("left") == [0, 0]  # although XLA and TensorFlow keep the functions of compiled steps for ever
    first, second = (found["error"] for found in result.values("cut"))
    assert first.startswith("RingError: entry") and "a second gradient before the averages" in first
    assert "rank 0 gave up a step (entry" in second
    (told,) = result.values("exits")  # no exception that the script has caught
    assert told.startswith("PeerFailed rank 1") and "exit status 4 (sys.exit)" in told, told


class Extended(keras.callbacks.Callback):
    """As a class of a script whose `on_train_begin` calls that of a `BroadcastCallback`, in a process that joins."""

    def on_train_begin(self, logs=None):
        self.found = self.calls(3)

    def calls(self, depth):
        return self.calls(depth - 1) if depth else enclosing_list(self)


def test_a_process_that_joins_finds_the_list_of_callbacks_of_a_class_that_a_script_has_extended():
    callback = Extended()
    callbacks = keras.callbacks.CallbackList([callback])
    callbacks.on_train_begin()
    assert callback.found is callbacks
