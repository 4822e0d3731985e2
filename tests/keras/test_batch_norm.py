"""Means and variances of all ranks' batches are those of one batch, and so are their gradients."""

import keras
import numpy as np

import ring_plugins as ring
from ring_plugins.keras.batch_norm import BatchMoments, SyncBatchNormalization, SynchronizedBatchNorm
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
    assert SynchronizedBatchNorm(model, every=None)._layers == layers[1:2]
    vars(layers[1])["_moments"] = layers[1]._moments
    assert SynchronizedBatchNorm(model, every=True)._layers == layers[:1]
    ours = keras.Sequential([keras.Input((3,)), SyncBatchNormalization()])
    assert SynchronizedBatchNorm(ours, every=False)._layers == ours.layers


def test_a_rank_without_values_counts_for_nothing():
    batches = [np.ones((0, 2)), np.array([[1.0, 2.0], [3.0, 6.0]])]

    def rank_of(rank, communicator):
        count, batch = len(batches[rank]), batches[rank]
        own = np.stack([batch.mean(0), batch.var(0)]) if count else np.full((2, 2), np.nan)
        return BatchMoments(communicator).combine(own, np.array(float(count)))[0]

    assert [found.tolist() for found in on_thread_ranks(2, rank_of)] == [[[2, 4], [1, 4]]] * 2


def test_a_layer_that_synchronizes_is_keras_own_in_one_process_and_in_a_file(tmp_path):
    x = np.random.default_rng(0).normal(size=(6, 3))
    model = keras.Sequential([keras.Input((3,)), SyncBatchNormalization(momentum=0.5)])
    plain = keras.layers.BatchNormalization(momentum=0.5)
    try:
        outputs = [keras.ops.convert_to_numpy(one(x, training=True)) for one in (model, plain)]
    finally:
        ring.shutdown()
    assert np.array_equal(*outputs)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras").layers[0]
    assert type(again) is SyncBatchNormalization and again.momentum == 0.5 and not again.supports_jit
