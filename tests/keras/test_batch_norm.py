"""Means and variances of all ranks' batches are those of one batch, and so are their gradients."""

import keras
import numpy as np

from ring_plugins.keras.batch_norm import BatchMoments, SynchronizedBatchNorm
from tests.core.collectives.thread_ranks import on_thread_ranks


def test_moments_and_their_gradients_are_those_of_one_batch():
    batches = [np.random.default_rng(rank).normal(rank, size=(3 + 2 * rank, 4)) for rank in range(3)]
    together = np.concatenate(batches)
    upstream = np.random.default_rng(9).normal(size=(3, 2, 4))

    def rank_of(rank, communicator):
        moments, own = BatchMoments(communicator), np.stack([batches[rank].mean(0), batches[rank].var(0)])
        combined, share = moments.combine(own, np.array(float(len(batches[rank]))))
        return combined, share, moments.gradient(own, combined, share, upstream[rank])

    def loss(own):
        """That of all ranks, by the moments of each."""
        counts = np.array([len(batch) for batch in batches])
        shares = (counts / counts.sum())[:, None]
        mean = (shares * own[:, 0]).sum(0)
        variance = (shares * (own[:, 1] + (own[:, 0] - mean) ** 2)).sum(0)
        return (upstream.sum(0) * np.stack([mean, variance])).sum()

    owns = np.stack([np.stack([batch.mean(0), batch.var(0)]) for batch in batches])
    for rank, (combined, share, gradient) in enumerate(on_thread_ranks(3, rank_of)):
        assert np.allclose(combined, [together.mean(0), together.var(0)])
        assert share == len(batches[rank]) / len(together)
        expected, step = np.zeros((2, 4)), 1e-6
        for place in np.ndindex(2, 4):
            more, less = owns.copy(), owns.copy()
            more[(rank, *place)] += step
            less[(rank, *place)] -= step
            expected[place] = (loss(more) - loss(less)) / (2 * step)
        assert np.allclose(gradient, expected, atol=1e-7)


def test_layers_are_those_that_are_wanted_and_not_changed_yet():
    layers = [keras.layers.BatchNormalization(), keras.layers.BatchNormalization(), keras.layers.ReLU()]
    layers[1].synchronized = True  # which a layer can be made with on TensorFlow only
    model = keras.Sequential([keras.Input((3,)), *layers])
    assert SynchronizedBatchNorm(model, every=True)._layers == layers[:2]
    assert SynchronizedBatchNorm(model, every=False)._layers == layers[1:2]
    vars(layers[1])["_moments"] = layers[1]._moments
    assert SynchronizedBatchNorm(model, every=True)._layers == layers[:1]
