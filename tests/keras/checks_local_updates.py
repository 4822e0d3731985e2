"""`BroadcastCallback(sync_every=...)` against one process that has a model for each host, and exchanges them by numpy.

Run by test_local_updates.py, on ranks that count as several hosts.
"""

# ruff: noqa: E402  # ranks that start before Keras is imported import it in parallel

import os
import pathlib
import re
import time

import ring_plugins as ring

ring.init(ranks=int(os.environ["TEST_RANKS"]))

import keras
import numpy as np
import pytest
from keras import layers

from ring_plugins.keras import (
    BroadcastCallback,
    DistributedOptimizer,
    LearningRateWarmupCallback,
    MetricAverageCallback,
    SyncBatchNormalization,
    undistribute,
)
from ring_plugins.keras.local_updates import BetweenHosts
from tests.checks import run

if keras.backend.backend() == "torch":
    import torch

    torch.set_num_threads(1)
RANK, SIZE, HOST = ring.rank(), ring.size(), ring.node_rank()
HOSTS = ring.all_gather_object(HOST)
IS_ONE_HOST = len(set(HOSTS)) == 1
BATCH, LINE = 4, 16
PATH = os.environ["TEST_PATH"]


def network(optimizer="sgd", seed=5, **options):
    keras.utils.set_random_seed(seed)
    inner = {"sgd": keras.optimizers.SGD, "adam": keras.optimizers.Adam}[optimizer](0.05, **options)
    model = keras.Sequential([
        keras.Input((5,)),
        layers.Dense(24, "tanh", use_bias=False),
        layers.BatchNormalization(momentum=0.5),
        layers.Dense(1),
    ])  # fmt: skip
    model.compile(inner, "mse", metrics=["mae"])
    return model


def data(steps, rank=RANK):
    x = np.random.default_rng(rank).normal(size=(steps * BATCH, 5)).astype("float32")
    return x, x.sum(1, keepdims=True)


def flat(variables):
    return np.concatenate([np.ravel(keras.ops.convert_to_numpy(one)) for one in variables])


def put(variables, values):
    for one in variables:
        count = int(np.prod(one.shape))
        one.assign(values[:count].reshape(one.shape))
        values = values[count:]


def are_equal(values, ranks=None):
    told = ring.all_gather_object(np.asarray(values).tobytes())
    return all(one == told[RANK] for rank, one in enumerate(told) if ranks is None or rank in ranks)


def fit(model, steps, epochs=2, callbacks=(), validate=False, **options):
    x, y = data(steps)
    arguments = {"validation_data": data(2, RANK + 50)} if validate else {}
    sync = BroadcastCallback(synchronized_batch_norm=True, **options)
    return model.fit(
        x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, callbacks=[*callbacks, sync], **arguments
    )


class Simulated:
    """All hosts in one process."""

    def __init__(self, every, outer=(1.0, 0.0), fragments=1, delay=0, optimizer="sgd", **options):
        self.every, self.outer, self.fragments, self.delay = every, outer, fragments, delay
        self.models = {host: network(optimizer, **options) for host in dict.fromkeys(HOSTS)}
        self.anchor = self.trained(HOSTS[0])
        self.velocity, lines = np.zeros_like(self.anchor), -(-self.anchor.size // LINE)
        cuts = [lines * i // fragments * LINE for i in range(fragments)] + [self.anchor.size]
        self.parts = [slice(*cuts[i : i + 2]) for i in range(fragments)]

    def trained(self, host):
        return flat(self.models[host].trainable_variables).astype("float64")

    def average(self, of, steps=None):
        """Of all ranks, so each host counts as often as it has ranks, and by its steps."""
        steps = steps or dict.fromkeys(HOSTS, 1)
        return sum(steps[host] * of(host) for host in HOSTS) / sum(steps[host] for host in HOSTS)

    def exchange(self, part, steps=None, begun=None):
        """Move weights by an exchange, which may have begun with earlier ones."""
        begun = begun or {host: self.trained(host) for host in self.models}
        change = self.average(begun.get, steps)[part] - self.anchor[part]
        lr, momentum = self.outer
        self.velocity[part] = momentum * self.velocity[part] + change
        self.anchor[part] += lr * (change + momentum * self.velocity[part])
        for host, model in self.models.items():
            whole = self.trained(host)
            whole[part] += self.anchor[part] - begun[host][part]
            put(model.trainable_variables, whole.astype("float32"))

    def average_statistics(self, steps=None, begun=None):
        average = self.average((begun or self.copies()[1]).get, steps)
        for model in self.models.values():
            put(model.non_trainable_weights, average)

    def copies(self):
        """By host, the weights, and the statistics."""
        statistics = {host: flat(model.non_trainable_weights) for host, model in self.models.items()}
        return {host: self.trained(host) for host in self.models}, statistics

    def end_late(self, turn, weights, statistics):
        self.exchange(self.parts[turn], begun=weights)
        if turn == self.fragments - 1:
            self.average_statistics(begun=statistics)

    def step(self, host, steps, step):
        """Take one of so many steps of an epoch on a host."""
        parts = [data(steps, rank) for rank in range(SIZE) if HOSTS[rank] == host]
        rows = slice(step * BATCH, (step + 1) * BATCH)
        self.models[host].train_on_batch(*(np.concatenate([part[i][rows] for part in parts]) for i in (0, 1)))

    def run(self, steps, epochs):
        for _ in range(epochs):
            turn, since, late = 0, [0] * self.fragments, None
            for step in range(steps):
                for host in self.models:
                    self.step(host, steps, step)
                since = [one + 1 for one in since]
                if late and step == late[0]:
                    self.end_late(*late[1:])
                    late = None
                if (step + 1) % (self.every // self.fragments) == 0:
                    if self.delay:
                        late = step + self.delay, turn, *self.copies()
                    else:
                        self.exchange(self.parts[turn])
                        if turn == self.fragments - 1:
                            self.average_statistics()
                    since[turn], turn = 0, (turn + 1) % self.fragments
            if late:
                self.end_late(*late[1:])
            for part, count in zip(self.parts, since, strict=True):
                if count:
                    self.exchange(part)
            if since[-1]:
                self.average_statistics()
        return self.models[HOST].weights


def all_ranks_compute_what_one_process_does():
    for optimizer, every, outer, fragments, delay, fits in (
        ("sgd", 3, (1.0, 0.0), 1, 0, 1),
        ("adam", 6, (0.7, 0.3), 3, 0, 1),
        ("sgd", 3, (0.9, 0.6), 1, 0, 2),  # with a velocity that goes on
        ("adam", 6, (0.7, 0.3), 2, 2, 1),
    ):
        simulated = Simulated(every, outer, fragments, delay, optimizer)
        expected = flat(simulated.run(7, 2))
        model = network(optimizer, seed=5 + RANK)  # which begins as rank 0's
        for _ in range(fits):
            fit(model, 7, 2 // fits, sync_every=every, outer=outer, fragments=fragments, delay=delay)
        np.testing.assert_allclose(flat(model.weights), expected, rtol=2e-4, atol=2e-5)
        assert are_equal(flat(model.weights))


class Watch(keras.callbacks.Callback):
    """What a rank has at each step, and where callbacks validate and save."""

    def __init__(self, stops_at=None):
        super().__init__()
        self.equal, self.in_host, self.at_epoch, self.at_test, self.steps = [], [], [], [], 0
        self.stops_at = stops_at

    def _has(self):
        return flat(self.model.weights)

    def on_train_batch_begin(self, batch, logs=None):
        self.equal.append(are_equal(self._has()))
        self.in_host.append(are_equal(flat(self.model.trainable_variables), same_host()))

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.stops_at == self.steps:
            self.model.stop_training = True

    def on_test_begin(self, logs=None):
        self.at_test.append(are_equal(self._has()))

    def on_epoch_end(self, epoch, logs=None):
        self.at_epoch.append(are_equal(self._has()))
        self.logs = dict(logs)


def same_host():
    return [rank for rank in range(SIZE) if HOSTS[rank] == HOST]


def weights_are_equal_after_exchanges_and_metrics_are_of_all_ranks():
    model, watch = network("adam"), Watch()
    callbacks = [watch, MetricAverageCallback()]
    fit(model, 7, callbacks=callbacks, validate=True, sync_every=3, outer="nesterov", compression="int8")
    assert watch.equal == ([True, IS_ONE_HOST, IS_ONE_HOST] * 2 + [True]) * 2
    assert all(watch.in_host) and watch.at_epoch == watch.at_test == [True] * 2
    assert len({*map(repr, ring.all_gather_object(watch.logs))}) == 1
    assert are_equal(flat(model.weights))


def only_the_root_writes_what_all_ranks_have():
    path = pathlib.Path(PATH) / f"{RANK}.keras"
    keeps = keras.callbacks.ModelCheckpoint(path)
    model = network("adam")
    fit(model, 5, callbacks=[keeps], sync_every=4)
    assert path.exists() == (RANK == 0)
    if RANK == 0:
        saved = keras.models.load_model(path)
        assert np.array_equal(flat(saved.weights), flat(model.weights))


def a_fit_goes_on_from_its_backup_of_an_epoch():
    saves = lambda: keras.callbacks.BackupAndRestore(os.path.join(PATH, "epochs"), delete_checkpoint=False)  # noqa: E731
    fit(network("adam"), 5, 1, callbacks=[saves()], sync_every=2)
    model, counts = network("adam", seed=1), Count()
    fit(model, 5, 3, callbacks=[counts, saves()], sync_every=2)
    assert counts.steps == 10
    assert are_equal(flat(model.weights))


def a_rank_that_wants_to_stop_stops_all_at_the_next_exchange():
    model, counts = network(), Count(3 if RANK == SIZE - 1 else None)
    fit(model, 20, callbacks=[counts], sync_every=4)
    assert are_equal(flat(model.weights))
    told = ring.all_gather_object(counts.steps)
    assert max(told) == (3 if IS_ONE_HOST else 4) and told[-1] == 3, told


class Count(Watch):
    def on_train_batch_begin(self, batch, logs=None):
        pass


def early_stopping_is_that_of_all_ranks():
    model, counts = network(), Count()
    stops = keras.callbacks.EarlyStopping("mae", patience=0, min_delta=100, restore_best_weights=True)
    fit(model, 3, 9, callbacks=[counts, stops, MetricAverageCallback()], sync_every=2)
    assert counts.steps == 6
    assert are_equal(flat(model.weights))


def hosts_and_ranks_may_have_different_numbers_of_batches():
    model, counts = network("adam"), Count()
    fit(model, 4 + 3 * HOST + RANK % 2, callbacks=[counts, MetricAverageCallback()], validate=True, sync_every=2)
    assert are_equal(flat(model.weights)) and np.isfinite(flat(model.weights)).all()
    assert all(counts.at_epoch)


class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.1 * HOST)


def hosts_exchange_by_time():
    """One process takes as many steps between exchanges as each host has, and hosts weigh by these."""
    steps, outer, model, counts = 20, (0.9, 0.6), network(), []
    exchange = BetweenHosts._exchange

    def noting(self, fragment, told):
        counts.append({HOSTS[rank]: told[rank].since[fragment] for rank in range(SIZE)})
        exchange(self, fragment, told)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BetweenHosts, "_exchange", noting)
        fit(model, steps, callbacks=[Slow()], sync_every="1s", outer=outer)
    simulated, done = Simulated(1, outer), dict.fromkeys(HOSTS, 0)
    for found in counts:
        for host, count in found.items():
            for _ in range(count):
                simulated.step(host, steps, done[host] % steps)
                done[host] += 1
        if any(found.values()):
            simulated.exchange(simulated.parts[0], found)
            simulated.average_statistics(found)
    assert {*done.values()} == {2 * steps}
    assert IS_ONE_HOST or any(found[HOSTS[0]] > found[HOSTS[-1]] > 0 for found in counts), counts
    np.testing.assert_allclose(flat(model.weights), flat(simulated.models[HOST].weights), rtol=2e-4, atol=2e-5)
    assert are_equal(flat(model.weights))


def averages_of_weights_over_time_are_averaged_too():
    model = network("adam", use_ema=True, ema_momentum=0.5)
    fit(model, 5, sync_every=2)  # at whose end the model gets them
    assert are_equal(flat(model.weights))


def layers_that_always_synchronize_do_so_inside_a_host():
    model = keras.Sequential([keras.Input((5,)), SyncBatchNormalization(), layers.Dense(1)])
    model.compile("sgd", "mse")
    x, y = data(3 + 2 * HOST)
    model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[BroadcastCallback(sync_every=2)])
    assert are_equal(flat(model.weights))


def warm_up_is_to_the_ranks_of_a_host():
    model = network()
    rates = LearningRateWarmupCallback(0)
    seen = []
    see = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(logs["learning_rate"]))
    fit(model, 3, callbacks=[rates, see], sync_every=2)
    assert seen == pytest.approx([0.05 * HOSTS.count(HOST)] * 2)


def sequences_of_fits_and_frozen_layers():
    model = network("adam")
    model.layers[0].trainable = False
    model.compile("adam", "mse")
    frozen = flat(model.layers[0].weights)
    for _ in range(2):
        fit(model, 3, 1, sync_every=2)
        assert are_equal(flat(model.weights))
    assert np.array_equal(flat(model.layers[0].weights), frozen)
    fit(model, 3, 1)  # every step
    assert are_equal(flat(model.weights))


def what_does_not_work_is_named_on_all_ranks():
    last = SIZE - 1
    for name, first, second, more in (
        ("sync_every", 4, 8, {}),
        ("sync_every", None, "30s", {}),
        ("outer", "average", (0.9, 0.6), {"sync_every": 4}),
    ):
        told = (
            rf"{name} differs among ranks \(rank 0: {re.escape(str(first))}, .*rank {last}: {re.escape(str(second))}\)"
        )
        with pytest.raises(ring.MismatchError, match=f"{told}. Pass the same {name} to BroadcastCallback on all ranks"):
            fit(network(), 9, **{name: second if last == RANK else first}, **more)
    with pytest.raises(ring.ArgumentError, match="with 2 exchanges.*sync_every is 4, and steps 10"):
        fit(network(), 5, sync_every=4, outer=(0.7, 0.9))
    saves = keras.callbacks.BackupAndRestore(os.path.join(PATH, "backup"), save_freq=2)
    with pytest.raises(ring.RingError, match=r"BackupAndRestore\(save_freq=2\) saves in the middle"):
        fit(network(), 5, callbacks=[saves], sync_every=4)
    model = network()
    DistributedOptimizer(model.optimizer)
    with pytest.raises(ring.ArgumentError, match=r"SGD was passed to DistributedOptimizer. Call .*undistribute"):
        fit(model, 5, sync_every=4)
    undistribute(model.optimizer)
    fit(model, 5, sync_every=4)
    assert are_equal(flat(model.weights))


def an_exception_on_one_rank_ends_the_fit_of_all():
    class Raises(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 3 and RANK == SIZE - 1:
                raise ZeroDivisionError

    for delay in (0, 2):
        model = network()
        with pytest.raises(ZeroDivisionError if RANK == SIZE - 1 else ring.RingError):
            fit(model, 9, callbacks=[Raises()], sync_every=3, delay=delay)
        fit(model, 5, sync_every=4)
        assert are_equal(flat(model.weights))


run([
    all_ranks_compute_what_one_process_does,
    weights_are_equal_after_exchanges_and_metrics_are_of_all_ranks,
    only_the_root_writes_what_all_ranks_have,
    a_fit_goes_on_from_its_backup_of_an_epoch,
    a_rank_that_wants_to_stop_stops_all_at_the_next_exchange,
    early_stopping_is_that_of_all_ranks,
    hosts_and_ranks_may_have_different_numbers_of_batches,
    hosts_exchange_by_time,
    averages_of_weights_over_time_are_averaged_too,
    layers_that_always_synchronize_do_so_inside_a_host,
    warm_up_is_to_the_ranks_of_a_host,
    sequences_of_fits_and_frozen_layers,
    what_does_not_work_is_named_on_all_ranks,
    an_exception_on_one_rank_ends_the_fit_of_all,
])  # fmt: skip
