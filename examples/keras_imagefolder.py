"""Train a small residual network on a folder of images with tf.data and Keras, on several processes, and resume it.

    python examples/keras_imagefolder.py --epochs 4             # creates a folder of images if there is none
    python examples/keras_imagefolder.py --epochs 8             # resumes after epoch 4
    mpirun -n 8 --hostfile hosts python examples/keras_imagefolder.py --images /data/train --epochs 90

The folder contains one folder of PNG files per class. With several hosts, the images and the checkpoint must be on each
host or on shared storage.
"""

import argparse
import os
import time
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import ring_plugins as ring
from ring_plugins.keras import BroadcastCallback, LearningRateWarmupCallback, MetricAverageCallback, shard

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--ranks", type=int, default=2, help="processes, unless a launcher has started them already")
parser.add_argument("--images", type=Path, default=Path("digits"), help="folder with one folder of PNG files per class")
parser.add_argument("--checkpoint", type=Path, default=Path("imagefolder.keras"), help="written after each epoch")
parser.add_argument("--epochs", type=int, default=8)
arguments = parser.parse_args()

batch_size = 32  # per rank
learning_rate = 0.05  # for one rank; warm-up multiplies it by the number of ranks (Goyal et al. 2017)
warmup_epochs = 2
pixels = 16


def make_images(folder: Path) -> None:
    """Write scikit-learn's scanned digits as files."""
    from sklearn.datasets import load_digits

    scans = load_digits()
    for number, (scan, label) in enumerate(zip(scans.images, scans.target, strict=True)):
        file = folder / str(label) / f"{number:04}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        enlarged = np.kron(scan * 15.9, np.ones((2, 2)))[..., np.newaxis].astype("uint8")
        file.write_bytes(tf.io.encode_png(enlarged).numpy())


def decode(file: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    image = tf.io.decode_png(tf.io.read_file(file), channels=1)
    return tf.image.resize(tf.cast(image, tf.float32) / 255.0, (pixels, pixels)), label


def shake(image: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Move the image by up to two pixels."""
    padded = tf.image.resize_with_crop_or_pad(image, pixels + 4, pixels + 4)
    return tf.image.random_crop(padded, (pixels, pixels, 1)), label


def residual(x: keras.KerasTensor, filters: int) -> keras.KerasTensor:
    y = layers.Conv2D(filters, 3, strides=2, padding="same", use_bias=False)(x)
    y = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(y))
    y = layers.BatchNormalization(momentum=0.9)(layers.Conv2D(filters, 3, padding="same", use_bias=False)(y))
    return layers.ReLU()(y + layers.Conv2D(filters, 1, strides=2)(x))


started = time.perf_counter()
ring.init(ranks=arguments.ranks)
keras.utils.set_random_seed(1)
if ring.local_rank() == 0 and not arguments.images.exists():
    make_images(arguments.images)
ring.barrier()

classes = sorted(folder.name for folder in arguments.images.iterdir())
found = [(str(file), i) for i, name in enumerate(classes) for file in sorted((arguments.images / name).glob("*.png"))]
order = np.random.default_rng(1).permutation(len(found))  # the same on every rank
files, labels = zip(*(found[i] for i in order), strict=True)
count = len(files) // 5
training = tf.data.Dataset.from_tensor_slices((list(files[count:]), list(labels[count:])))
validation = tf.data.Dataset.from_tensor_slices((list(files[:count]), list(labels[:count])))
# Shard the names, not the images, so that every rank reads only its own files. The rest is as for one process.
training = (
    shard(training, shuffle=True, seed=1).map(decode).map(shake).batch(batch_size, drop_remainder=True).prefetch(2)
)
validation = shard(validation, remainder="keep").map(decode).batch(batch_size)

if arguments.checkpoint.exists():
    model = keras.saving.load_model(arguments.checkpoint)  # BroadcastCallback broadcasts rank 0's
else:
    inputs = keras.Input((pixels, pixels, 1))
    x = layers.ReLU()(layers.Conv2D(16, 3, padding="same")(inputs))
    x = layers.GlobalAveragePooling2D()(residual(residual(x, 32), 64))
    model = keras.Model(inputs, layers.Dense(len(classes))(x))
    model.compile(
        optimizer=keras.optimizers.SGD(learning_rate, momentum=0.9, nesterov=True),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
steps_per_epoch = int(training.cardinality())
epochs_before = int(model.optimizer.iterations.numpy()) // steps_per_epoch

history = model.fit(
    training,
    validation_data=validation,
    initial_epoch=epochs_before,
    epochs=arguments.epochs,
    verbose=2,
    callbacks=[
        BroadcastCallback(),
        MetricAverageCallback(),
        LearningRateWarmupCallback(warmup_epochs, verbose=1),
        keras.callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.2, patience=2),
        keras.callbacks.ModelCheckpoint(arguments.checkpoint),  # one rank writes
    ],
)

if ring.rank() == 0 and history.epoch:
    print(
        f"ranks {ring.size()}, epochs {epochs_before} to {arguments.epochs}, {time.perf_counter() - started:.1f} s, "
        f"validation accuracy {history.history['val_accuracy'][-1]:.3f}"
    )
ring.shutdown()
