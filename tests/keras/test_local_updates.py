"""Local updates in `fit`: `checks_local_updates.py` on ranks that count as hosts, and what one process can see."""

import json
import signal
from collections import Counter
from pathlib import Path

import pytest

from ring_plugins.core.base.errors import ArgumentError
from tests.keras.launches import environment
from tests.keras.test_backup import SCRIPT as BACKUP
from tests.keras.test_backup import completed, counted
from tests.launch import run_ranks

CHECKS = Path(__file__).with_name("checks_local_updates.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "processes", "nodes"),
    [
        ("torch", 2, "1,1"),
        ("tensorflow", 3, "1,2"),
        ("jax", 3, "1,2"),
        ("torch", 4, "1,1,1,1"),
        ("torch", 2, "2"),  # one host
    ],
)
@pytest.mark.timeout(900)
def test_hosts_exchange_weights(backend, processes, nodes, tmp_path):
    env = environment(backend, RING_VIRTUAL_NODES=nodes, TEST_PATH=str(tmp_path))
    result = run_ranks(CHECKS, processes, "exported", env=env, timeout=600)
    for rank in range(processes):
        assert {*result.reports[rank].values()} == {"ok"}


def fit_with_backup(folder, nodes="1,1", backend="torch", **options):
    options = {"folder": str(folder), "kind": "arrays", "random": False, "warm-up": False, **options}
    env = environment(backend, TEST_OPTIONS=json.dumps(options), RING_VIRTUAL_NODES=nodes)
    return run_ranks(BACKUP, sum(map(int, nodes.split(","))), "exported", env=env, timeout=240, check=False)


def left(result):
    assert result.returncode, result
    assert "Traceback" not in result.output and "it has saved its state in" in result.output, result


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "nodes"), [("torch", "1,1"), ("tensorflow", "1,2"), ("jax", "1,1")])
def test_all_leave_behind_the_exchange_after_a_signal_and_go_on_as_if_nothing_had_been(tmp_path, backend, nodes):
    """Weights are bitwise the same, so the velocity of the outer optimizer goes on, too."""
    options = {"backend": backend, "nodes": nodes, "optimizer": "SGD", "count": 120}
    options["broadcast"] = {"sync_every": 3, "outer": [0.9, 0.6]}
    ranks = sum(map(int, nodes.split(",")))
    whole = fit_with_backup(tmp_path / "whole", **options)
    first = fit_with_backup(tmp_path / "parts", **options, signal=[ranks - 1, 11, signal.SIGTERM])
    left(first)
    assert all(numbers == [*range(10), 0, 1, 2] for numbers in first.values("numbers")), first
    second = fit_with_backup(tmp_path / "parts", **options)
    assert completed(second) == completed(whole), second
    assert first.values("numbers")[0] + second.values("numbers")[0] == whole.values("numbers")[0]
    assert counted(first, second) == counted(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "at", "often"),
    [
        ({"count": 120}, 7, {3: 120}),  # rank 0 has ended its epoch, behind which its data has the next one's order
        ({"count": 240, "steps": 8}, 11, {1: 240}),  # data goes on in the second epoch, and ends in the third
    ],
)
def test_hosts_that_are_at_different_batches_leave_and_no_sample_is_lost(tmp_path, more, at, often):
    options = {"broadcast": {"sync_every": "0.2s"}, **more}
    first = fit_with_backup(tmp_path, **options, signal=[1, at, signal.SIGTERM], slow=[1, 0.4])
    left(first)
    steps = [len(numbers) for numbers in first.values("numbers")]
    assert steps[0] > steps[1] and "what others have read since is read again" in first.output, first
    second = fit_with_backup(tmp_path, **options)
    completed(second)
    assert second.values("numbers")[0][0] == steps[1] % more.get("steps", steps[0] + 1)
    again = Counter(first.values("seen")[0][6 * steps[1] :])  # by rank 0, ahead of rank 1
    assert Counter((counted(first, second) - again).values()) == often


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sync_every": 0}, "sync_every=0 must be a number of steps from 1, or a time"),
        ({"sync_every": 8, "fragments": 3}, "fragments=3 must divide sync_every=8"),
        ({"sync_every": 8, "outer": "adam"}, "outer='adam' must be"),
        ({"sync_every": 8, "delay": 8}, "delay=8 must be 0, or a number of steps below sync_every / fragments = 8"),
        ({"delay": 2}, r"BroadcastCallback\(delay=2\) needs sync_every"),
        ({"sync_every": 8, "compression": "auto"}, "exchanges of local updates are too few"),
        ({"outer": "nesterov"}, r"BroadcastCallback\(outer='nesterov'\) needs sync_every"),
        ({"fragments": 2}, r"BroadcastCallback\(fragments=2\) needs sync_every"),
        ({"sync_every": 8, "shard_optimizer": True}, "does not work with shard_optimizer=True"),
        ({"sync_every": 8, "average_gradients": False}, "does not work with average_gradients=False"),
    ],
)
def test_bad_arguments(options, text):
    from ring_plugins.keras import BroadcastCallback

    with pytest.raises(ArgumentError, match=text):
        BroadcastCallback(**options)


def test_numbers_of_variables_are_read_and_written_in_stretches():
    import keras
    import numpy as np

    from ring_plugins.keras.local_updates import VariableWeights

    variables = [keras.Variable(np.arange(count) + 100.0 * i, dtype="float32") for i, count in enumerate((5, 30))]
    variables.append(keras.Variable(np.ones((), "int32"), dtype="int32", trainable=False))
    variables.append(keras.Variable(np.full((2, 2), 7.0), dtype="bfloat16"))
    weights = VariableWeights(lambda: None, variables[:3], variables[3:])
    assert (weights.trained, weights.averaged, weights.dtype) == (48, 4, "float32")  # three lines, and no integers
    stretch = np.full(20, -1.0, np.float32)
    weights.read(32, stretch)
    assert stretch.tolist() == [127.0, 128.0, 129.0] + [0.0] * 13 + [7.0] * 4
    stretch[:] = np.arange(20)
    weights.write(32, stretch)
    assert keras.ops.convert_to_numpy(variables[1]).tolist() == [100.0 + i for i in range(27)] + [0.0, 1.0, 2.0]
    stretch[:] = 0  # no variable has its memory
    assert keras.ops.convert_to_numpy(keras.ops.cast(variables[3], "float32")).tolist() == [[16, 17], [18, 19]]


@pytest.mark.parametrize(("every", "execution", "expected"), [(2, 1, [2, 4, 6, 8]), (2, 4, [4, 8]), (3, 2, [4, 8])])
def test_an_execution_of_several_steps_is_followed_by_one_exchange(every, execution, expected):
    from ring_plugins.keras.local_updates import BetweenHosts

    class Counting(BetweenHosts):
        teams = 2

        def __init__(self):
            self._last, self.steps, self._left, self._late, self._turn, self.met = -1, 0, every, None, 0, []

        def _meet(self, turn):
            self.met.append(self.steps)
            self._left = every

    counting = Counting()
    for batch in range(execution - 1, 8, execution):
        counting.after_batch(batch)
    assert counting.met == expected and counting.steps == 8


@pytest.mark.parametrize("saves", [True, False])
def test_a_signal_travels_with_an_exchange_and_stops_a_fit_that_saves_nothing(monkeypatch, saves):
    from types import SimpleNamespace

    from ring_plugins.keras import local_updates

    elastic = SimpleNamespace(wants_change=True, is_ending=False)
    elastic.change_members = lambda: setattr(elastic, "is_ending", True)
    monkeypatch.setattr(local_updates, "current", lambda: SimpleNamespace(elastic=elastic))
    model, backups = SimpleNamespace(stop_training=False), SimpleNamespace(exist=saves, outer=())

    class Telling(local_updates.BetweenHosts):
        def __init__(self):
            self._callback, self.follows_signals = SimpleNamespace(_model=model, backups=backups), False
            self._velocity, self.exchanges = "velocity", 3

    telling = Telling()
    assert telling.wants_change() == 0, "nobody asks"
    telling.follows_signals = True
    wanted = telling.wants_change()
    assert wanted == local_updates._END and telling.follow_changes(wanted) and elastic.is_ending
    assert backups.outer == ["velocity", 3] and model.stop_training is not saves
    model.stop_training, elastic.is_ending = False, False
    assert not telling.follow_changes(local_updates._STOP) and model.stop_training


def test_a_backup_has_the_place_in_the_data_of_the_rank_that_has_come_least_far(monkeypatch):
    """The root's data may be in another epoch's order, or in another round of `steps_per_epoch`."""
    from types import SimpleNamespace

    from ring_plugins.keras import local_updates

    class Fit(local_updates.LocalFit):
        def __init__(self):
            self._backups = SimpleNamespace(exist=True, save=lambda *found: saved.append(found), leave=lambda: None)
            self._between = SimpleNamespace(exchange=lambda: None)
            self._communicator = SimpleNamespace(all_gather_object=lambda own, _: [own, (3, True, "state", "slow's")])
            self._root, self._is_completing, self._place = SimpleNamespace(is_here=lambda: False), False, "fast's"
            self._callback = SimpleNamespace(model=None)

    saved: list = []
    monkeypatch.setattr(local_updates, "current", lambda: SimpleNamespace(elastic=SimpleNamespace(is_ending=True)))
    monkeypatch.setattr(local_updates, "own_state", lambda _: "state")
    Fit()._end_if_told(9, 0, False)
    assert saved == [(0, 3, True, ("state", "state"), "slow's")]
