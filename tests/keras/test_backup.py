"""A job that is told to end saves and leaves, and goes on in the middle of its epoch: no sample twice, none lost."""

import json
import signal
from collections import Counter

import numpy as np
import pytest

from tests.keras.launches import environment
from tests.launch import REPOSITORY, run_ranks

SCRIPT = REPOSITORY / "tests" / "keras" / "checks_backup.py"
COUNT, EPOCHS, STEPS = 60, 3, 5  # steps are those of an epoch
TERM = int(signal.SIGTERM)


def run(folder, backend, ranks, **options):
    options = {"folder": str(folder), "kind": "arrays", **options}
    env = environment(backend, TEST_OPTIONS=json.dumps(options))
    return run_ranks(SCRIPT, ranks, env=env, timeout=240, check=False)


def completed(result):
    assert result.returncode == 0, result
    weights = result.values("weights")
    assert all(found == weights[0] for found in weights), "ranks differ"
    assert result.values("left") == [False] * len(weights), "the backup is to go when fit is over"
    return weights[0]


def counted(*runs):
    """How often each sample was seen, of all runs and ranks."""
    return Counter(sample for result in runs for of_rank in result.values("seen") for sample in of_rank)


def interrupted(folder, backend, ranks, step, rank=1, number=TERM, **options):
    """A run that is told to end in a step, and leaves behind that or the next one."""
    result = run(folder, backend, ranks, signal=[rank, step, number], **options)
    assert result.returncode == 143, result
    assert "Traceback" not in result.output, result
    numbers = result.values("numbers")
    assert all(found == numbers[0] for found in numbers), "ranks have left behind different steps"
    assert step < len(numbers[0]) + 1 <= step + 3, result
    return result


CASES = [
    ("torch", "arrays", {}),
    ("tensorflow", "arrays", {}),
    ("jax", "arrays", {}),
    ("torch", "DataLoader", {"passes": 2}),
    ("torch", "PyDataset", {"broadcast": {"shard_optimizer": True}}),
    ("tensorflow", "workers", {}),
    ("tensorflow", "tf.data", {}),
    ("tensorflow", "tf.data of unknown length", {}),
    ("torch", "generator", {"steps": STEPS}),
    ("jax", "arrays", {"steps": 3}),
    ("jax", "PyDataset", {"remainder": "keep"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "kind", "more"), CASES)
def test_as_many_ranks_go_on_as_if_nothing_had_been(tmp_path, backend, kind, more):
    whole = run(tmp_path / "whole", backend, 2, kind=kind, **more)
    expected = completed(whole)
    first = interrupted(tmp_path / "parts", backend, 2, 6, kind=kind, **more)
    second = run(tmp_path / "parts", backend, 2, kind=kind, **more)
    assert completed(second) == expected, second
    assert counted(first, second) == counted(whole)
    numbers = first.values("numbers")[0] + second.values("numbers")[0]
    assert numbers == whole.values("numbers")[0]
    ends = whole.values("history")[0]
    for name, values in second.values("history")[0].items():
        assert np.allclose(values, ends[name][-len(values) :], rtol=1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "tensorflow"])
@pytest.mark.parametrize(
    ("before", "after", "more"),
    [
        (2, 3, {}),
        (2, 1, {"passes": 2}),
        (1, 2, {"kind": "DataLoader"}),
        (2, 3, {"count": 61, "remainder": "keep"}),
        (3, 2, {"kind": "PyDataset", "remainder": "keep"}),
    ],
)
def test_another_number_of_ranks_reads_the_rest(tmp_path, backend, before, after, more):
    """With as many samples in each step, weights are those of a job whose ranks stay."""
    options = {"random": False, "warm-up": False, **more}
    whole = run(tmp_path / "whole", backend, before, **options)
    completed(whole)
    first = interrupted(tmp_path / "parts", backend, before, 7, rank=before - 1, **options)
    second = run(tmp_path / "parts", backend, after, **options)
    completed(second)
    found = counted(first, second)
    assert set(found.values()) == {EPOCHS} and len(found) == more.get("count", COUNT)
    if "kind" not in more:
        pairs = zip(whole.values("numeric")[0], second.values("numeric")[0], strict=True)
        assert max(np.abs(np.subtract(a, b)).max() for a, b in pairs) < 1e-6
        logs = whole.values("history")[0], second.values("history")[0]
        assert np.allclose(logs[0]["mae"], logs[1]["mae"], rtol=1e-6)  # the backup has those before, too


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "tensorflow"])
def test_a_job_that_was_killed_goes_on_from_its_last_backup(tmp_path, backend):
    options = {"every": 3}
    expected = completed(run(tmp_path / "whole", backend, 2, **options))
    first = run(tmp_path / "parts", backend, 2, signal=["all", 10, int(signal.SIGKILL)], **options)
    assert first.returncode != 0 and len(first.values("numbers")[0]) == 10
    second = run(tmp_path / "parts", backend, 2, **options)
    assert completed(second) == expected, second
    assert second.values("numbers")[0] == [4, *range(STEPS)]  # the last backup was behind step 9


@pytest.mark.slow
def test_streams_of_another_number_of_ranks_begin_anew_and_say_so(tmp_path):
    options = {"kind": "generator", "steps": STEPS, "every": False}
    interrupted(tmp_path, "torch", 2, 6, **options)
    second = run(tmp_path, "torch", 3, **options)
    completed(second)
    assert "generator cannot be divided anew, and the backup is of 2 ranks, these are 3" in second.output


@pytest.mark.slow
@pytest.mark.parametrize("step", [STEPS - 1, 2 * STEPS - 2])
def test_behind_the_last_step_of_an_epoch_the_epoch_is_completed(tmp_path, step):
    expected = completed(run(tmp_path / "whole", "torch", 2))
    first = run(tmp_path / "parts", "torch", 2, signal=[0, step, TERM])
    assert first.returncode == 143, first
    second = run(tmp_path / "parts", "torch", 2)
    assert completed(second) == expected
    numbers = first.values("numbers")[0] + second.values("numbers")[0]
    assert numbers == [*range(STEPS)] * EPOCHS


@pytest.fixture
def model():
    import keras

    keras.utils.set_random_seed(1)
    inputs = keras.Input((3,))
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dropout(0.5)(inputs)))
    model.compile("adam", "mse")
    return model


def test_one_file_holds_weights_and_place_and_is_whole_at_any_time(tmp_path, model, monkeypatch):
    import keras

    from ring_plugins.keras import backup

    writer = keras.callbacks.BackupAndRestore(str(tmp_path), double_checkpoint=True)
    writer.set_model(model)
    place = {"epoch": 3, "batch": 4, "ranks": 2, "steps": 7, "data": {"batches": 4}, "callbacks": {}}
    own, outer = [[np.ones(2), np.array(1.5)], [np.zeros(2), np.array(2.5)]], [np.arange(3.0), np.array(7.0)]
    first = backup.Backup(place, [np.arange(2)], own, [], outer)
    backup.write(writer, first)
    found = backup.read(writer._weights_path)
    assert found.place == place and found.seeds[0].tolist() == [0, 1]
    assert [[one.tolist() for one in own] for own in found.own] == [[[1, 1], 1.5], [[0, 0], 2.5]]
    assert [one.tolist() for one in found.outer] == [[0, 1, 2], 7]
    weights = model.get_weights()
    monkeypatch.setattr(backup.os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))  # killed there
    model.set_weights([weight + 1 for weight in weights])
    with pytest.raises(KeyboardInterrupt):
        backup.write(writer, first._replace(place={**place, "epoch": 4}))
    assert backup.read(writer._weights_path).place == place
    model.load_weights(writer._weights_path)
    assert all(np.array_equal(a, b) for a, b in zip(weights, model.get_weights(), strict=True))
    model.save_weights(writer._weights_path)
    assert backup.read(writer._weights_path) is None, "Keras alone has written it"


def test_a_job_of_one_rank_saves_when_it_is_told_and_goes_on(tmp_path, model):
    import keras

    import ring_plugins as ring
    from ring_plugins.core.world import current
    from ring_plugins.keras import BroadcastCallback, shard

    x = np.arange(24.0).reshape(8, 3)
    seen = []

    def run(stops_behind):
        data = shard((x, x[:, :1]), batch_size=2, seed=1)

        def note(batch, logs):
            seen.append(batch)
            current().elastic.preemption_notice.given = len(seen) == stops_behind

        noting = keras.callbacks.LambdaCallback(on_train_batch_end=note)
        callbacks = [BroadcastCallback(), keras.callbacks.BackupAndRestore(str(tmp_path / "backup")), noting]
        try:
            model.fit(data, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
        except SystemExit as error:
            return error.code
        finally:
            ring.shutdown()
        return 0

    assert run(6) == 143 and (tmp_path / "backup").exists()
    model.set_weights([0 * weight for weight in model.get_weights()])
    assert run(None) == 0 and seen == [0, 1, 2, 3, 0, 1, 2, 3]
    assert not (tmp_path / "backup").exists()
    assert int(model.optimizer.iterations) == 8


def test_other_batches_than_before_begin_the_epoch_anew(tmp_path, model, capfd):
    """What is skipped is counted in batches: others would lose samples, or read them twice."""
    import keras

    import ring_plugins as ring
    from ring_plugins.core.world import current
    from ring_plugins.keras import BroadcastCallback

    x, seen = np.arange(24.0).reshape(8, 3), []

    def run(size):
        def note(batch, logs):
            seen.append(batch)
            current().elastic.preemption_notice.given = len(seen) == 2

        noting = keras.callbacks.LambdaCallback(on_train_batch_end=note)
        backup = keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))
        try:
            model.fit(x, x[:, :1], size, verbose=0, callbacks=[BroadcastCallback(), backup, noting], shuffle=False)
        except SystemExit:
            pass
        finally:
            ring.shutdown()

    run(2)
    run(4)
    assert seen == [0, 1, 0, 1], "behind two batches of two"
    assert "batches of ndarray have 4 samples, and 2 before" in capfd.readouterr().err


def test_only_who_writes_backups_lets_the_job_end_with_one(tmp_path):
    """Else a signal would end it behind the words that its state was saved."""
    from types import SimpleNamespace

    import keras

    from ring_plugins.keras.backup import Backups

    writer = keras.callbacks.BackupAndRestore(str(tmp_path))
    for writes in (True, False):
        backups = Backups(SimpleNamespace(), [])
        backups._writing = [(writer, lambda writes=writes: writes)]
        assert backups.are_written_here is writes
