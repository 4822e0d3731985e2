"""What a process gets that joins a `fit`: the state of the other ranks' callbacks, which must fit its own model."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest

from ring_plugins.keras import BroadcastCallback, broadcast, job
from ring_plugins.keras.joining import kind_of_state, load_state, named, place_of_fit, state_of
from ring_plugins.keras.writers import HeldWriter


def test_a_callback_of_keras_goes_on_with_numbers_and_keeps_what_the_script_gave():
    other = keras.callbacks.EarlyStopping(monitor="loss", patience=3)
    vars(other).update(wait=2, best=0.5, best_epoch=7, best_weights=[np.ones(2)])
    own = keras.callbacks.EarlyStopping(monitor="accuracy", patience=5)
    load_state(own, state_of(other))
    assert (own.wait, own.best, own.best_epoch) == (2, 0.5, 7) and np.array_equal(own.best_weights[0], np.ones(2))
    assert (own.monitor, own.patience) == ("accuracy", 5)


def test_a_callback_of_the_script_takes_part_if_it_has_a_state_dict():
    class Counts(keras.callbacks.Callback):
        count = 0

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    class Mute(keras.callbacks.Callback):
        pass

    other, own = Counts(), Counts()
    other.count = 4
    load_state(own, state_of(other))
    assert own.count == 4 and state_of(Mute()) is None
    load_state(own, None)  # that the other rank has none of this name
    assert own.count == 4


def test_callbacks_of_a_kind_are_numbered_and_writers_are_the_callbacks_inside():
    writer = keras.callbacks.CSVLogger("log.csv")
    callbacks = [keras.callbacks.Callback(), HeldWriter(writer, lambda: True), keras.callbacks.Callback()]
    assert [name for name, _ in named(callbacks)] == ["Callback 1", "CSVLogger 1", "Callback 2"]
    assert dict(named(callbacks))["CSVLogger 1"] is writer


def test_a_place_says_epochs_and_what_kind_of_model():
    def model(units):
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(units)])

    place = place_of_fit({"epochs": 3}, model(2))
    assert place.startswith("fit() with 3 epochs, with 2 variables of model and optimizer, of 8 elements")
    assert kind_of_state(model(2)) == kind_of_state(model(2)) != kind_of_state(model(3))


@pytest.mark.parametrize("is_joining", [False, True])
def test_a_process_that_is_yet_to_join_takes_part_in_fit_though_it_is_alone_until_then(monkeypatch, is_joining):
    begun = []
    fit = SimpleNamespace(begin=begun.append, abandon=None, joined_after=2)
    monkeypatch.setattr(broadcast, "SynchronizedFit", lambda *_: fit)
    monkeypatch.setattr(broadcast, "fits_of", lambda _: [])
    monkeypatch.setattr(job, "current", lambda: SimpleNamespace(is_joining=is_joining))
    callback = BroadcastCallback()
    callback.set_params({})
    vars(callback).update(_model=SimpleNamespace(optimizer=None), _root=None)
    alone = SimpleNamespace(size=1, ranks=(0,), all_gather_object=lambda value, _: [value])
    callback.ranks = SimpleNamespace(communicator=alone)
    callback.on_train_begin()
    assert len(begun) == is_joining
    assert callback._epoch == (2 if is_joining else None)
