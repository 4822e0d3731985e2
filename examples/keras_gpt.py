"""Train a small GPT on the source code of Python's standard library with Keras, resume it, and let it write.

    python examples/keras_gpt.py                       # two processes, a few minutes on two cores
    python examples/keras_gpt.py --epochs 4            # resumes from gpt.keras after the epochs it has seen
    KERAS_BACKEND=jax python examples/keras_gpt.py     # or torch; the default is TensorFlow
    mpirun -n 8 --hostfile hosts python examples/keras_gpt.py --epochs 20

The model reads bytes, so there is no tokenizer. With several hosts, gpt.keras must be where rank 0 runs.
"""

import argparse
import os
import sysconfig
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from keras import layers

import ring_plugins as ring
from ring_plugins.keras import BroadcastCallback, LearningRateWarmupCallback, MetricAverageCallback, shard

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--ranks", type=int, default=2, help="processes, unless a launcher has started them already")
parser.add_argument("--epochs", type=int, default=2, help="in all, over resumed runs")
parser.add_argument("--checkpoint", type=Path, default=Path("gpt.keras"))
parser.add_argument("--files", type=int, default=40, help="modules of the standard library to learn from")
arguments = parser.parse_args()

context = 64  # bytes that the model looks back
batch_size = 16  # per rank
width, heads, depth = 128, 4, 2
learning_rate = 1e-3  # for one rank; warm-up multiplies it by the square root of the number of ranks

ring.init(ranks=arguments.ranks)
keras.utils.set_random_seed(1)

modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[: arguments.files]
text = np.frombuffer(b"\n".join(module.read_bytes() for module in modules), dtype=np.uint8).astype("int32")
count = (len(text) - 1) // context
x = text[: count * context].reshape(count, context)
y = text[1 : count * context + 1].reshape(count, context)  # the same, shifted by one


def block(x: keras.KerasTensor) -> keras.KerasTensor:
    seen = layers.LayerNormalization()(x)
    x = x + layers.MultiHeadAttention(heads, width // heads)(seen, seen, use_causal_mask=True)
    thought = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
    return x + layers.Dense(width)(thought)


if arguments.checkpoint.exists():
    model = keras.saving.load_model(arguments.checkpoint)  # BroadcastCallback broadcasts rank 0's
else:
    inputs = keras.Input((context,), dtype="int32")
    hidden = layers.Embedding(256, width)(inputs) + layers.Embedding(context, width)(keras.ops.arange(context))
    for _ in range(depth):
        hidden = block(hidden)
    model = keras.Model(inputs, layers.Dense(256)(layers.LayerNormalization()(hidden)))
    model.compile(
        optimizer=keras.optimizers.AdamW(learning_rate, clipnorm=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
data = shard((x, y), batch_size=batch_size, seed=1)
done = int(keras.ops.convert_to_numpy(model.optimizer.iterations)) // data.num_batches
epochs_before = ring.broadcast_object(done if ring.rank() == 0 else None)

history = model.fit(
    data,
    initial_epoch=epochs_before,
    epochs=arguments.epochs,
    shuffle=False,  # shard shuffles, in the same order on all ranks
    verbose=2,
    callbacks=[
        BroadcastCallback(),  # rank 0's weights and optimizer, read from the file, go to all ranks
        MetricAverageCallback(),
        LearningRateWarmupCallback(warmup_epochs=1, scaling="sqrt"),
        keras.callbacks.ModelCheckpoint(arguments.checkpoint),  # one rank writes
    ],
)


def write(start: str, length: int) -> str:
    random = np.random.default_rng(1)
    written = list(start.encode())
    for _ in range(length):
        window = written[-context:]
        padded = np.array([window + [0] * (context - len(window))])  # later bytes are masked
        scores = keras.ops.convert_to_numpy(model(padded))[0, len(window) - 1].astype("float64") / 0.8
        likely = np.exp(scores - scores.max())
        written.append(int(random.choice(256, p=likely / likely.sum())))
    return bytes(written).decode(errors="replace")


if ring.rank() == 0:
    loss = history.history["loss"][-1] if history.epoch else float("nan")
    print(f"ranks {ring.size()}, epochs {epochs_before} to {arguments.epochs}, loss {loss:.2f}")
    print(write("def ", 100))
ring.shutdown()
