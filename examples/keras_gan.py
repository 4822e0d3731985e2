"""Train a small GAN on scanned digits with Keras, on several processes: two optimizers in one `train_step`.

    python examples/keras_gan.py                           # starts the second process itself
    mpirun -n 2 python examples/keras_gan.py               # mpirun starts the processes
    KERAS_BACKEND=torch python examples/keras_gan.py       # the default is TensorFlow; this `train_step` is not for JAX

Both optimizers are attributes of the model, so `BroadcastCallback` finds both. `train_step` needs no change.
"""

import argparse
import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
from keras import layers
from sklearn.datasets import load_digits

import ring_plugins as ring
from ring_plugins.keras import BroadcastCallback, MetricAverageCallback, shard

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--ranks", type=int, default=2, help="processes, unless a launcher has started them already")
parser.add_argument("--epochs", type=int, default=40)
arguments = parser.parse_args()

noise_size, batch_size = 16, 32  # per rank
ring.init(ranks=arguments.ranks)
keras.utils.set_random_seed(1)
binary = keras.losses.BinaryCrossentropy(from_logits=True)


class GAN(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.Sequential(
            [keras.Input((noise_size,)), layers.Dense(128, "relu"), layers.Dense(64, "sigmoid")]
        )
        self.critic = keras.Sequential(
            [keras.Input((64,)), layers.Dense(128, "leaky_relu"), layers.Dropout(0.3), layers.Dense(1)]
        )
        self.noise = keras.random.SeedGenerator(1)  # BroadcastCallback gives each rank other noise
        self.generator_loss = keras.metrics.Mean(name="generator_loss")
        self.critic_loss = keras.metrics.Mean(name="critic_loss")

    def compile(self, generator_optimizer, critic_optimizer) -> None:
        super().compile()
        self.generator_optimizer, self.critic_optimizer = generator_optimizer, critic_optimizer

    def call(self, images):
        return self.critic(images)

    def imagine(self, count):
        return self.generator(keras.random.normal((count, noise_size), seed=self.noise))

    def critics_loss(self, real):
        judged_real = self.critic(real, training=True)
        judged_false = self.critic(self.imagine(batch_size), training=True)
        ones, zeros = keras.ops.ones_like(judged_real), keras.ops.zeros_like(judged_false)
        return binary(0.9 * ones, judged_real) + binary(zeros, judged_false)

    def generators_loss(self, real):
        judged = self.critic(self.imagine(batch_size), training=True)
        return binary(keras.ops.ones_like(judged), judged)

    def update(self, loss_of, real, network, optimizer, metric) -> None:
        """One step of one of the two networks: TensorFlow's tape or torch's backward."""
        variables = network.trainable_variables
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            with tf.GradientTape() as tape:
                loss = loss_of(real)
            gradients = tape.gradient(loss, variables)
        else:
            self.zero_grad()
            loss = loss_of(real)
            loss.backward()
            gradients = [variable.value.grad for variable in variables]
        optimizer.apply(gradients, variables)  # averaged over all ranks here
        metric.update_state(loss)

    def train_step(self, data):
        real = data[0] if isinstance(data, tuple) else data
        self.update(self.critics_loss, real, self.critic, self.critic_optimizer, self.critic_loss)
        self.update(self.generators_loss, real, self.generator, self.generator_optimizer, self.generator_loss)
        return {"generator_loss": self.generator_loss.result(), "critic_loss": self.critic_loss.result()}


images = (load_digits().images / 16).astype("float32").reshape(-1, 64)  # 8 x 8 pixels of 0 to 16
model = GAN()
model.compile(keras.optimizers.Adam(1e-3, beta_1=0.5), keras.optimizers.Adam(1e-3, beta_1=0.5))
history = model.fit(
    shard(images, batch_size=batch_size, seed=1),
    epochs=arguments.epochs,
    shuffle=False,  # shard shuffles, in the same order on all ranks
    verbose=0,
    callbacks=[BroadcastCallback(), MetricAverageCallback()],
)

drawn = keras.ops.convert_to_numpy(model.imagine(4)).reshape(4, 8, 8)
if ring.rank() == 0:
    losses = ", ".join(f"{name} {values[-1]:.2f}" for name, values in history.history.items())
    print(f"ranks {ring.size()}, epochs {len(history.epoch)}, {losses}")
    for row in range(8):
        print("  ".join("".join(" .:-=+*#%@"[int(pixel * 9.99)] * 2 for pixel in image[row]) for image in drawn))
ring.shutdown()
