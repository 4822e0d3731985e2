"""Train on scanned digits with Keras while ranks are killed: the others finish the step and go on.

    python examples/keras_survive.py                   # four processes; rank 0 is killed in epochs 3, 6 and 9
    python examples/keras_survive.py --kill            # nobody is killed, to compare the accuracy
    python examples/keras_survive.py --on-failure replace   # another process takes the place of each
    KERAS_BACKEND=jax python examples/keras_survive.py # or tensorflow; the default is torch

The only argument for that is `ring.init(on_failure=...)`. The lowest rank that is left becomes rank 0, and prints.
`fit` is called once an epoch, so that with "continue" `shard` deals all data to the ranks that are left. With "replace"
it deals the share of a lost rank to the process that takes its place, which joins in `state.commit()`.
"""

import argparse
import os
import signal
import time

os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import ring_plugins as ring
from ring_plugins.keras import BroadcastCallback, MetricAverageCallback, TrainingState, shard

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--ranks", type=int, default=4, help="number of processes")
parser.add_argument("--kill", type=int, nargs="*", default=[3, 6, 9], help="epochs in which rank 0 is killed")
parser.add_argument("--on-failure", choices=["continue", "replace"], default="continue", help="what the others do")
parser.add_argument("--pause", type=float, help="seconds a step takes longer, as in a larger network")
arguments = parser.parse_args()
if arguments.pause is None:  # a new process imports for seconds, in which this training would be over
    arguments.pause = 0.15 if arguments.on_failure == "replace" else 0.0

batch_size = 16  # per rank
epochs = 12
validation_digits = 360  # a fifth of the 1,797

started = time.perf_counter()
ring.init(ranks=arguments.ranks, on_failure=arguments.on_failure)
keras.utils.set_random_seed(1)

scans = load_digits()
images = (scans.images / 16).astype("float32")[..., np.newaxis]  # 8 x 8 pixels of 0 to 16
order = np.random.default_rng(1).permutation(len(images))  # the same on every rank
training, validation = order[validation_digits:], order[:validation_digits]

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        layers.Conv2D(32, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(2),
        layers.Flatten(),
        layers.Dropout(0.3),  # every rank drops different neurons
        layers.Dense(128, activation="relu"),
        layers.Dense(10),
    ]
)
model.compile(
    optimizer=keras.optimizers.Adam(1e-3 * ring.size()),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)


class Killer(keras.callbacks.Callback):
    """Kills rank 0 in the middle of some epochs, unless it is the last."""

    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(arguments.pause)
        if state.epoch in arguments.kill and batch == 5 and ring.rank() == 0 and ring.size() > 1:
            os.kill(os.getpid(), signal.SIGKILL)


state = TrainingState(model, epoch=1)
for state.epoch in range(state.epoch, epochs + 1):  # noqa: B020 - the range is made once
    state.commit()
    history = model.fit(
        shard((images[training], scans.target[training]), batch_size=batch_size, seed=state.epoch),
        validation_data=shard((images[validation], scans.target[validation]), shuffle=False, remainder="keep"),
        shuffle=False,  # shard shuffles, in the same order on all ranks
        verbose=0,
        callbacks=[BroadcastCallback(), MetricAverageCallback(), Killer()],
    ).history
    if ring.rank() == 0:
        print(f"epoch {state.epoch:2}, ranks {ring.size()}, accuracy {history['val_accuracy'][-1]:.3f}")

if ring.rank() == 0:
    seconds, accuracy = time.perf_counter() - started, history["val_accuracy"][-1]
    print(f"ranks {ring.size()}, {seconds:.1f} s, validation accuracy {accuracy:.3f}")
ring.shutdown()
