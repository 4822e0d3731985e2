"""Callbacks that observe a job: balance, timeline and drift."""

import json
import re

import pytest

from tests.launch import run_ranks

SCRIPT = """
import os, sys
import numpy as np
import ring_plugins as ring
ring.init(ranks=int(os.environ["TEST_RANKS"]))
import keras
import torch
from ring_plugins.keras import BalanceMonitor, BroadcastCallback, TimelineCallback
from tests.worker import report

torch.set_num_threads(1)
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(1)])
model.compile("sgd", "mse")

class FlipABit(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if self.flips and batch == 7 and ring.rank() == 1:
            with torch.no_grad():
                model.trainable_variables[2].value.data.view(torch.int32)[3, 0] ^= 1

def fit(flips):
    x = np.random.default_rng(ring.rank()).random((160, 8))
    flip = FlipABit()
    flip.flips = flips
    callbacks = [BalanceMonitor(), TimelineCallback(sys.argv[1], 2, 5), flip, BroadcastCallback(drift_check_every=5)]
    return model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0, callbacks=callbacks)

report("logs", sorted(fit(False).history))
try:
    fit(True)
except ring.DriftError as error:
    report("error", str(error))
"""


@pytest.mark.slow
def test_balance_in_the_logs_a_timeline_and_drift(tmp_path):
    result = run_ranks(SCRIPT, 2, args=[str(tmp_path)], env={"KERAS_BACKEND": "torch"}, timeout=120)
    logs = result.reports[0]["logs"]
    assert "loss" in logs
    assert "ring/waiting_ms" in logs
    assert "slowest in" in result.output
    assert len(result.values("error")) == 2
    for said in result.values("error"):
        assert re.match(
            r"after 10 steps the weights of rank \d differ from those of rank \d: first in \S+/kernel, in", said
        )
    events = json.loads((tmp_path / "timeline.json").read_text())
    assert {event["pid"] for event in events if event.get("cat") == "bucket"} == {0, 1}
