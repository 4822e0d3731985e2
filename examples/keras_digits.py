"""Train a small convolutional network on scanned digits with Keras, on several processes.

    python examples/keras_digits.py                                  # starts the second process itself
    python examples/keras_digits.py --ranks 1                        # one process, nothing to communicate
    mpirun -n 2 python examples/keras_digits.py                      # mpirun starts the processes
    KERAS_BACKEND=torch mpirun -n 2 python examples/keras_digits.py  # or jax; the default is TensorFlow

It differs from a script for one process in `ring.init`, `shard`, and three callbacks.
"""

import argparse
import os
import time

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import ring_plugins as ring
from ring_plugins.keras import (
    BroadcastCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
    communication_of,
    shard,
)

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument(
    "--ranks", type=int, default=2, help="number of processes, unless a launcher has started them already"
)
arguments = parser.parse_args()

batch_size = 32  # per rank; two ranks together use 64 digits per step
learning_rate = 1e-3  # for one rank; warm-up multiplies it by the number of ranks
epochs = 20
validation_digits = 360  # a fifth of the 1,797

started = time.perf_counter()
ring.init(ranks=arguments.ranks)
keras.utils.set_random_seed(1)

scans = load_digits()
images = (scans.images / 16).astype("float32")[..., np.newaxis]  # 8 x 8 pixels of 0 to 16
order = np.random.default_rng(1).permutation(len(images))  # the same on every rank
training, validation = order[validation_digits:], order[:validation_digits]

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        layers.Conv2D(32, 3, padding="same", activation="relu"),
        layers.Conv2D(64, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(2),
        layers.Flatten(),
        layers.Dropout(0.3),  # every rank drops different neurons
        layers.Dense(128, activation="relu"),
        layers.Dropout(0.3),
        layers.Dense(10),
    ]
)
model.compile(
    optimizer=keras.optimizers.Adam(learning_rate),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)


class Clock(keras.callbacks.Callback):
    """Measures the time of all steps, and the time they waited for communication."""

    seconds, waited = 0.0, 0.0

    def on_train_batch_begin(self, batch, logs=None):
        self.began = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self.seconds += time.perf_counter() - self.began
        self.waited, _ = communication_of(self.model)


clock = Clock()
history = model.fit(
    shard((images[training], scans.target[training]), batch_size=batch_size, seed=1),
    validation_data=shard((images[validation], scans.target[validation]), shuffle=False, remainder="keep"),
    epochs=epochs,
    shuffle=False,  # shard shuffles, in the same order on all ranks
    verbose=2,
    callbacks=[clock, BroadcastCallback(), MetricAverageCallback(), LearningRateWarmupCallback(warmup_epochs=3)],
)

if ring.rank() == 0:
    print(
        f"ranks {ring.size()}, {time.perf_counter() - started:.1f} s, "
        f"validation accuracy {history.history['val_accuracy'][-1]:.3f}, "
        f"{clock.waited / clock.seconds:.0%} of a step spent waiting for communication"
    )
ring.shutdown()
