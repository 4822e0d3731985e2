"""Train on scanned digits in a plain JAX loop, on hosts that exchange weights only every few steps.

    python examples/jax_slow_network.py                                       # two processes of one host
    RING_VIRTUAL_NODES=1,1 mpirun -n 2 python examples/jax_slow_network.py    # which count as two hosts
    mpirun -n 4 --host a:2,b:2 python examples/jax_slow_network.py            # two ranks on each of two hosts

Inside a host gradients are averaged in every step. Every 16 steps, all hosts average what they have learned, and take
that for a gradient of SGD with Nesterov's momentum. docs/slow_networks.md says what this costs, and what for.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from sklearn.datasets import load_digits

import ring_plugins as ring

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--ranks", type=int, default=2, help="number of processes, unless a launcher has started them")
parser.add_argument("--every", type=int, default=16, help="steps between exchanges")
arguments = parser.parse_args()

steps, batch_size, learning_rate, momentum = 640, 32, 0.1, 0.9
outer_learning_rate, outer_momentum = 0.9, 0.6  # which need some 25 exchanges; 1.0 and 0.0 average
validation_digits = 360  # a fifth of the 1,797

ring.init(ranks=arguments.ranks)
host = ring.Group.split(ring.node_rank())  # the ranks of this host

scans = load_digits()
images, labels = (scans.images / 16).reshape(-1, 64).astype(np.float32), scans.target
order = np.random.default_rng(1).permutation(len(images))  # the same on every rank
validation, training = order[:validation_digits], order[validation_digits:][ring.rank() :: ring.size()]


def initialized(key, shapes=((64, 128), (128, 10))):
    """A pytree of weights."""
    return [
        {"w": jax.random.normal(key, shape) * (2 / shape[0]) ** 0.5, "b": jnp.zeros(shape[1])}
        for key, shape in zip(jax.random.split(key, len(shapes)), shapes, strict=True)
    ]


# One vector of all weights, so that an exchange is one call.
weights, tree = ravel_pytree(initialized(jax.random.key(ring.rank())))


def outputs(weights, x):
    hidden, last = tree(weights)
    return jax.nn.relu(x @ hidden["w"] + hidden["b"]) @ last["w"] + last["b"]


@jax.jit
def gradient_of(weights, x, y):
    return jax.grad(lambda own: -jax.nn.log_softmax(outputs(own, x))[jnp.arange(len(y)), y].mean())(weights)


@jax.jit
def updated(weights, trace, gradient):
    trace = momentum * trace + gradient
    return weights - learning_rate * trace, trace


def exchange(weights, anchor, velocity):
    """Average what all ranks have learned since they were at the anchor, and move it by that: all go on from there."""
    change = ring.all_reduce(np.asarray(weights) - anchor)  # the same bits on all ranks
    velocity = outer_momentum * velocity + change
    anchor = anchor + outer_learning_rate * (change + outer_momentum * velocity)
    return jnp.array(anchor), anchor, velocity


anchor = ring.broadcast(np.asarray(weights))  # all begin with rank 0's
weights, trace, velocity = jnp.array(anchor), jnp.zeros_like(weights), np.zeros_like(anchor)
draws = np.random.default_rng(ring.rank())
for step in range(1, steps + 1):
    batch = draws.choice(training, batch_size)
    gradient = np.asarray(gradient_of(weights, images[batch], labels[batch]))
    weights, trace = updated(weights, trace, ring.all_reduce(gradient, group=host))
    if step % arguments.every == 0 or step == steps:
        weights, anchor, velocity = exchange(weights, anchor, velocity)

right = np.asarray(outputs(weights, images[validation])).argmax(1) == labels[validation]
is_equal = len(set(ring.all_gather_object(np.asarray(weights).tobytes()))) == 1
if ring.rank() == 0:
    print(
        f"ranks {ring.size()}, hosts {ring.num_nodes()}, validation accuracy {right.mean():.3f}, "
        f"{'equal' if is_equal else 'different'} weights"
    )
ring.shutdown()
