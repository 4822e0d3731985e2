"""The rank that takes over from a lost writer goes on where that one was, and repeats what it had begun."""

from pathlib import Path
from types import SimpleNamespace

import keras
import pytest

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.keras.writers import HeldWriter, arrange, check_formats, saves_weights


class Model:
    """Has a loss to monitor, and notes where it is saved."""

    def __init__(self):
        self.saved = []
        self.metrics = []

    def save(self, path, overwrite):
        self.saved.append(Path(path).name)


@pytest.fixture
def model():
    return Model()


def held(writer, model, ranks=(False,)):
    """A `HeldWriter` at the start of a fit, and a function that lets this rank write from now on."""
    writes = list(ranks)
    writer.set_model(model)
    found = HeldWriter(writer, lambda: writes[0])
    found.set_params({"verbose": 0, "epochs": 3, "steps": 2})
    found.on_train_begin()
    found.settle()

    def take_over():
        writes[0] = True

    return found, take_over


def epoch_ends(writer, epoch, loss, is_settled=True):
    writer.on_epoch_begin(epoch)
    writer.on_epoch_end(epoch, {"loss": loss})
    if is_settled:
        writer.settle()


def test_the_best_model_is_that_of_all_epochs_also_of_those_that_another_rank_saved(model, tmp_path):
    best = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras", monitor="loss", save_best_only=True)
    writer, take_over = held(best, model)
    epoch_ends(writer, 0, 0.5)
    assert best.best == 0.5 and not model.saved
    take_over()
    epoch_ends(writer, 1, 0.6)
    epoch_ends(writer, 2, 0.4)
    assert model.saved == ["3.keras"]


def test_what_the_lost_rank_was_saving_is_saved_again(model, tmp_path):
    writer, take_over = held(keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras", monitor="loss"), model)
    epoch_ends(writer, 0, 0.5)
    epoch_ends(writer, 1, 0.4, is_settled=False)
    take_over()
    writer.settle()
    assert model.saved == ["2.keras"]


def test_batches_count_that_another_rank_has_seen(model, tmp_path):
    writer, take_over = held(keras.callbacks.ModelCheckpoint(tmp_path / "{batch}.keras", save_freq=4), model)
    writer.on_epoch_begin(0)
    for batch in range(8):
        if batch == 5:
            take_over()
        writer.on_train_batch_end(batch, {})
        writer.settle()
    assert model.saved == ["8.keras"]


@pytest.mark.parametrize("last", ["1,0.4\r\n", "1,0.", ""])
def test_lines_are_continued_and_none_is_missing_repeated_or_half(model, tmp_path, last):
    path = tmp_path / "log.csv"
    writer, take_over = held(keras.callbacks.CSVLogger(path), model)
    path.write_bytes(b"epoch,loss\r\n0,0.5\r\n" + last.encode())  # by the rank that is lost
    epoch_ends(writer, 0, 0.5)
    epoch_ends(writer, 1, 0.4, is_settled=False)
    take_over()
    writer.settle()
    epoch_ends(writer, 2, 0.3)
    assert path.read_text().split() == ["epoch,loss", "0,0.5", "1,0.4", "2,0.3"]


def test_what_a_subclass_adds_happens_on_the_rank_that_writes_only(model, tmp_path):
    uploaded = []

    class Uploads(keras.callbacks.ModelCheckpoint):
        def on_epoch_end(self, epoch, logs=None):
            super().on_epoch_end(epoch, logs)
            uploaded.append(epoch)

    writer, take_over = held(Uploads(tmp_path / "{epoch}.keras", monitor="loss"), model)
    epoch_ends(writer, 0, 0.5)
    take_over()
    epoch_ends(writer, 1, 0.4)
    assert uploaded == [1] and model.saved == ["2.keras"]


def test_a_backup_is_neither_written_nor_removed_by_the_others(model, tmp_path):
    writer, _ = held(keras.callbacks.BackupAndRestore(tmp_path), model)
    (tmp_path / "training_metadata.json").write_text('{"epoch": 1}')
    epoch_ends(writer, 1, 0.5)
    writer.on_train_end()
    writer.settle()
    assert [file.name for file in tmp_path.iterdir()] == ["training_metadata.json"]


def orbax_checkpoint(**attributes):
    """One without the package that writes."""
    callback = keras.callbacks.OrbaxCheckpoint.__new__(keras.callbacks.OrbaxCheckpoint)
    keras.callbacks.Callback.__init__(callback)
    vars(callback).update(attributes)
    return callback


@pytest.mark.parametrize("writes", [False, True])
def test_one_rank_writes_checkpoints_of_orbax(writes):
    checkpoint, first, last = orbax_checkpoint(), keras.callbacks.Callback(), keras.callbacks.Callback()
    callbacks = SimpleNamespace(callbacks=[checkpoint, last])
    assert saves_weights(callbacks)
    assert arrange(callbacks, first, last, lambda: writes, written_by_one=True, recovers=False) == []
    assert callbacks.callbacks == [first, *[checkpoint] * writes, last]


def test_orbax_goes_on_with_the_checkpoints_that_another_rank_was_writing(model):
    saved = []
    options = {"save_freq": "epoch", "save_best_only": True, "monitor": "loss", "monitor_op": lambda a, b: a < b}
    checkpoint = orbax_checkpoint(**options, best=None, _save_checkpoint=lambda step, logs: saved.append(step))
    checkpoint._is_improvement = lambda value, best: best is None or value < best
    writer, take_over = held(checkpoint, model)
    epoch_ends(writer, 0, 0.5)
    assert checkpoint.best == 0.5 and not saved
    take_over()
    epoch_ends(writer, 1, 0.6)
    epoch_ends(writer, 2, 0.4)
    assert saved == [2]


def test_orbax_which_asks_for_the_variables_of_a_sharded_optimizer_may_save_weights_only():
    check_formats(SimpleNamespace(callbacks=[orbax_checkpoint(save_weights_only=True)]))
    with pytest.raises(ArgumentError, match="OrbaxCheckpoint would save only a part"):
        check_formats(SimpleNamespace(callbacks=[orbax_checkpoint(save_weights_only=False)]))
