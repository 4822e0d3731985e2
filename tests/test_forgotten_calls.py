"""A joiner's first hour: scripts as README has them, typed with nothing exported, and with the classic mistakes.

The scripts without a mistake are README's own, which tests/test_documentation.py runs. Forgotten callbacks of Keras on
all backends are in tests/keras/test_broadcast.py.
"""

import re
import subprocess
import sys
import textwrap

import pytest

from tests.launchers import bare_environment

TORCH = """
    import os
    import torch
    import ring_plugins as ring
    from ring_plugins.torch import DistributedOptimizer, broadcast_parameters

    def train(average, broadcast):
        torch.manual_seed(ring.rank())  # as if the script had set no seed
        model = torch.nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        if average:
            optimizer = DistributedOptimizer(optimizer, model.named_parameters())
        if broadcast:
            broadcast_parameters(model)
        try:
            for _ in range(25):
                optimizer.zero_grad()
                model(torch.randn(4, 8)).square().mean().backward()
                optimizer.step()
        except ring.DriftError:
            print("DriftError after the second step", flush=True)
        ring.shutdown()

    for mistake in ("both", "broadcast", "averaging", "none", "broadcast on purpose"):
        os.environ["RING_WEIGHT_CHECK"] = "0" if "on purpose" in mistake else "1"
        ring.init(ranks=2)
        if ring.rank() == 0:
            print("forgotten:", mistake, flush=True)
        train(average=mistake not in ("both", "averaging"), broadcast=mistake in ("averaging", "none"))
"""

KERAS = """
    import keras, numpy as np
    import ring_plugins as ring
    from ring_plugins.keras import LearningRateWarmupCallback, MetricAverageCallback, shard

    ring.init(ranks=2)
    x, y = np.random.rand(64, 8), np.random.rand(64, 1)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01 * ring.size()), "mse")
    callbacks = [LearningRateWarmupCallback(warmup_epochs=1), MetricAverageCallback()]
    model.fit(shard((x, y)), shuffle=False, verbose=0, callbacks=callbacks)
"""


def typed(script, tmp_path, **exported):
    """What `python train.py` prints and its status, with only the variables that a shell has."""
    (tmp_path / "train.py").write_text(textwrap.dedent(script))
    return subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env={**bare_environment(), **exported},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )


TEXTS = (
    "training on 2 ranks on 1 host, started by this script",
    "the 2 ranks of this job have ended without communicating",
    "Call ring_plugins.torch.broadcast_parameters(model) before the first step",
    "Wrap the optimizer in ring_plugins.torch.DistributedOptimizer",
    "DriftError after the second step",
)


def test_a_plain_loop_is_told_what_it_forgot(tmp_path):
    ended = typed(TORCH, tmp_path)
    assert ended.returncode == 0, ended.stdout
    jobs = re.split("forgotten: (.*)\n", ended.stdout)
    said = {mistake: [text for text in TEXTS if text in jobs[i + 1]] for i, mistake in enumerate(jobs) if i % 2}
    averages, alone, differ, silent, ends = TEXTS
    assert said == {
        "both": [alone],
        "broadcast": [averages, differ, ends],
        "averaging": [silent],
        "none": [averages],
        "broadcast on purpose": [averages],
    }
    assert all(ended.stdout.count(text) <= 3 for text in TEXTS)


@pytest.mark.parametrize(
    "backend",
    ["torch", pytest.param("tensorflow", marks=pytest.mark.slow), pytest.param("jax", marks=pytest.mark.slow)],
)
def test_a_keras_script_without_broadcast_callback_ends_after_its_first_step(backend, tmp_path):
    pytest.importorskip("keras")
    ended = typed(KERAS, tmp_path, KERAS_BACKEND=backend, TF_CPP_MIN_LOG_LEVEL="3")
    assert ended.returncode != 0
    assert "training on 2 ranks on 1 host, started by this script" in ended.stdout
    assert "learning rate: 0.02 for one process, 0.04 for 2 ranks after warm-up. This script also reads" in ended.stdout
    assert "DriftError: after the first step the weights of rank" in ended.stdout
    assert "Add ring_plugins.keras.BroadcastCallback() to fit(callbacks=...) on all ranks" in ended.stdout
