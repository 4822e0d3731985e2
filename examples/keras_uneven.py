"""Train on as many digits as each rank happens to have, and evaluate and predict each digit of a test set once.

    python examples/keras_uneven.py                         # starts the other two processes itself
    KERAS_BACKEND=torch python examples/keras_uneven.py     # or jax; the default is TensorFlow
    python examples/keras_uneven.py --backup runs/uneven    # on SIGTERM, saves and leaves; started again, it goes on

Each rank has the digits of some writers, so ranks have different numbers of batches, and last batches of different
sizes. `fit` trains to the end of the longest, and each digit counts the same.
"""

import argparse
import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import ring_plugins as ring
from ring_plugins.keras import BroadcastCallback, MetricAverageCallback, predict, shard

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--ranks", type=int, default=3, help="number of processes")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--backup", help="directory of the backup, by default none")
arguments = parser.parse_args()

ring.init(ranks=arguments.ranks)
keras.utils.set_random_seed(1)

scans = load_digits()
images, digits = (scans.images / 16).astype("float32")[..., np.newaxis], scans.target
order = np.random.default_rng(1).permutation(len(images))  # the same on every rank
training, test = order[:1400], order[1400:]  # 397 for the test: three ranks cannot have equally many

# Rank r of n has r + 1 parts of 1 + 2 + ... + n.
ends = [r * (r + 1) * len(training) // (ring.size() * (ring.size() + 1)) for r in range(ring.size() + 1)]
own = training[ends[ring.rank()] : ends[ring.rank() + 1]]

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        layers.Conv2D(32, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(2),
        layers.Flatten(),
        layers.Dropout(0.2),  # every rank drops different neurons
        layers.Dense(128, activation="relu"),
        layers.Dense(10),
    ]
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(2e-3), loss, metrics=["accuracy"])

callbacks = [BroadcastCallback(), MetricAverageCallback()]
if arguments.backup:
    callbacks.append(keras.callbacks.BackupAndRestore(arguments.backup))
model.fit(
    images[own],
    digits[own],
    batch_size=32,
    epochs=arguments.epochs,
    shuffle=not arguments.backup,  # so that it can go on in the middle of an epoch
    verbose=2,
    callbacks=callbacks,
)

part = shard((images[test], digits[test]), shuffle=False, remainder="keep")  # each digit on one rank
_, accuracy = model.evaluate(part, verbose=0, callbacks=[MetricAverageCallback()])
predicted = predict(model, images[test], verbose=0).argmax(-1)  # of all ranks, in the order of the data
assert abs((predicted == digits[test]).mean() - accuracy) < 1e-6

batches = ring.all_gather_object(-(-len(own) // 32))
if ring.rank() == 0:
    print(f"ranks {ring.size()}, batches of an epoch {batches}, test accuracy {accuracy:.3f}")
ring.shutdown()
