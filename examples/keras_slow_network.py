"""Train on scanned digits with Keras on hosts that exchange weights only every few steps, for slow networks.

    python examples/keras_slow_network.py                                       # two processes of one host
    RING_VIRTUAL_NODES=1,1 mpirun -n 2 python examples/keras_slow_network.py    # which count as two hosts
    mpirun -n 4 --host a:2,b:2 python examples/keras_slow_network.py            # two ranks on each of two hosts
    KERAS_BACKEND=jax python examples/keras_slow_network.py                     # or torch; the default is TensorFlow

Inside a host gradients are averaged in every step, as ever. docs/slow_networks.md says what it costs, and what for.
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
from ring_plugins.keras import BroadcastCallback, MetricAverageCallback, shard

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--ranks", type=int, default=2, help="number of processes, unless a launcher has started them")
parser.add_argument("--every", type=int, default=16, help="steps between exchanges")
arguments = parser.parse_args()

validation_digits = 360  # a fifth of the 1,797

ring.init(ranks=arguments.ranks)
keras.utils.set_random_seed(1)

scans = load_digits()
images = (scans.images / 16).reshape(-1, 64).astype("float32")
order = np.random.default_rng(1).permutation(len(images))  # the same on every rank
training, validation = order[validation_digits:], order[:validation_digits]

model = keras.Sequential([keras.Input((64,)), layers.Dense(128, "relu"), layers.BatchNormalization(), layers.Dense(10)])
model.compile(
    optimizer=keras.optimizers.Adam(1e-3),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
history = model.fit(
    shard((images[training], scans.target[training]), batch_size=32, seed=1),
    validation_data=shard((images[validation], scans.target[validation]), shuffle=False, remainder="keep"),
    epochs=20,
    shuffle=False,  # shard shuffles, in the same order on all ranks
    verbose=2,
    callbacks=[
        # Some 40 exchanges: enough for a momentum of 0.6. With fewer than 25 use outer="average".
        BroadcastCallback(sync_every=arguments.every, outer=(0.9, 0.6), compression="int8"),
        MetricAverageCallback(),
    ],
)
if ring.rank() == 0:
    accuracy = history.history["val_accuracy"][-1]
    print(f"ranks {ring.size()}, hosts {ring.num_nodes()}, validation accuracy {accuracy:.3f}")
ring.shutdown()
