"""Ranks compare what they train with, and say what differs."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest

from ring_plugins.core.base.errors import DriftError, MismatchError
from ring_plugins.keras import consistency
from ring_plugins.keras.consistency import (
    KerasChecks,
    check_end_of_fit,
    check_equal_optimizers,
    checksums_of,
    options_of,
    rates_of,
)
from ring_plugins.observe.consistency import bits_of, differ
from tests.core.collectives.thread_ranks import on_thread_ranks


def exchange(checks, communicator):
    """What a pass does with the checks; returns whether the numbers of the ranks differ."""
    shares = np.mean(communicator.all_gather_object(bits_of(checks.number())), axis=0).tolist()
    checks.note_compared()
    if differ(shares):
        checks.say(communicator)
    return differ(shares)


def test_weights_and_options_travel_with_passes_1_2_4_and_8(monkeypatch, caplog):
    """Rank 1 differs from a step on: the pass behind the next due step says so, as a warning after the first."""
    monkeypatch.setattr(consistency, "is_check_wanted", lambda: True)

    def rank_of(rank, communicator):
        found = []
        for begins, what in ((0, "weights"), (1, "weights"), (3, "weights"), (3, "options"), (9, "nothing")):
            weight, optimizer = keras.Variable(np.zeros(3, "float32")), keras.optimizers.Adam(0.1)
            checks = KerasChecks(
                lambda weight=weight: checksums_of([weight]), lambda optimizer=optimizer: [options_of(optimizer)]
            )
            reads: list[str] = []
            look = checks.weights.look
            monkeypatch.setattr(
                checks.weights,
                "look",
                lambda when, warns, look=look, reads=reads: (reads.append(when), look(when, warns)),
            )
            error = "none"
            for step in range(10):
                checks.rates.take(0.1)
                try:
                    exchange(checks, communicator)
                except (DriftError, MismatchError) as raised:
                    error = f"{step} {type(raised).__name__}: {raised}"
                    break
                if step == begins and rank == 1:
                    optimizer.epsilon += what == "options"
                    weight.assign(weight + float(what == "weights"))
            found.append((error, reads))
        return found

    first, second = on_thread_ranks(2, rank_of)
    assert first == second
    at_start, after_first, later, option, nothing = first
    assert at_start[0].startswith("2 DriftError: after 2 steps the weights of rank")
    assert len([line for line in caplog.messages if line.startswith("after the first step the weights of rank")]) == 1
    assert after_first[0].startswith("2 DriftError: after 2 steps") and later[0].startswith(
        "4 DriftError: after 4 steps"
    )
    assert "add BroadcastCallback" not in later[0] and "changed its weights or averages in a way of its own" in later[0]
    assert option[0].startswith("4 MismatchError: the optimizer's epsilon differs among ranks")
    assert nothing == ("none", ["after the first step", "after 2 steps", "after 4 steps", "after 8 steps"])


def test_different_starts_are_named_as_the_cause_and_an_unread_rank_says_nothing(monkeypatch, caplog):
    monkeypatch.setattr(consistency, "is_check_wanted", lambda: True)

    def rank_of(rank, communicator):
        weight = keras.Variable(np.full(3, rank, "float32"))
        checks = KerasChecks(lambda: checksums_of([weight]))
        exchange(checks, communicator)
        exchange(checks, communicator)
        with pytest.raises(DriftError, match=r"after 2 steps .* Add ring_plugins\.keras\.BroadcastCallback\(\) to fit"):
            exchange(checks, communicator)
        joined = KerasChecks(lambda: checksums_of([weight]))
        if rank:
            joined.look(4)
        return exchange(joined, communicator)

    assert on_thread_ranks(2, rank_of) == [True, True]
    assert len([line for line in caplog.messages if "Add ring_plugins.keras.BroadcastCallback() to fit" in line]) == 1


def test_what_was_read_for_an_earlier_pass_says_nothing_of_later_weights(monkeypatch, caplog):
    """An exception has ended the last pass of rank 1 only, so the ranks read equal weights in different passes."""
    monkeypatch.setattr(consistency, "is_check_wanted", lambda: True)

    def rank_of(rank, communicator):
        weight = keras.Variable(np.zeros(3, "float32"))
        checks = KerasChecks(lambda: checksums_of([weight]))
        if rank == 0:
            checks.number()
            checks.note_compared()
        found = []
        for _ in range(6):
            found.append(exchange(checks, communicator))
            weight.assign(weight + 1)
        checks.begin_anew()
        return found, [exchange(checks, communicator) for _ in range(6)]

    assert on_thread_ranks(2, rank_of) == [([True, False, True, True, True, False], [False] * 6)] * 2
    assert not [line for line in caplog.messages if "weights" in line]


def test_optimizers_with_other_options_are_rejected_by_name():
    def rate(rank):
        return keras.optimizers.schedules.ExponentialDecay(0.1, 10 + rank, 0.9)

    different = {
        r"learning_rate differs among ranks \(rank 0: 0.1\d*, rank 1: 0.2": lambda r: keras.optimizers.SGD(
            0.1 * (1 + r)
        ),
        "learning_rate.config.decay_steps": lambda r: keras.optimizers.SGD(rate(r)),
        r"class differs among ranks \(rank 0: SGD, rank 1: Adam\)": lambda r: getattr(
            keras.optimizers, ("SGD", "Adam")[r]
        )(),
        "inner_optimizer.config.momentum": lambda r: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1, r / 2)
        ),
        "optimizers.0.learning_rate": lambda r: built(keras.optimizers.SGD(0.1 * (1 + r))),
    }

    def built(inner):
        several = keras.optimizers.MultiOptimizer(lambda variable: inner)
        several.build([keras.Variable([1.0])])
        return several

    def rank_of(rank, communicator):
        check_equal_optimizers(keras.optimizers.Adam(rate(0), name=f"adam_{rank}"), communicator)
        for text, make in different.items():
            with pytest.raises(MismatchError, match=text):
                check_equal_optimizers(make(rank), communicator)
        check_equal_optimizers(built(keras.optimizers.SGD(0.1)), communicator)
        checks = KerasChecks()
        checks.rates.take(*rates_of(built(keras.optimizers.SGD(0.1 * (1 + rank)))))
        with pytest.raises(MismatchError, match=r"learning rates differ among ranks \(rank 0: 0.1, rank 1: 0.2\)"):
            exchange(checks, communicator)

    on_thread_ranks(2, rank_of)


@pytest.mark.parametrize("which", ["weights", "decisions", "both", "neither"])
def test_what_callbacks_leave_behind_is_compared_when_fit_ends(monkeypatch, which):
    monkeypatch.setattr("ring_plugins.observe.consistency.is_check_wanted", lambda: True)
    monkeypatch.setattr(consistency, "is_check_wanted", lambda: True)
    optimizer = keras.optimizers.SGD(0.1)

    def rank_of(rank, communicator):
        stopping = keras.callbacks.EarlyStopping()
        vars(stopping).update(best_epoch=rank if which in ("decisions", "both") else 0, stopped_epoch=0)
        weight = np.full(3, rank if which in ("weights", "both") else 0, "float32")
        checksums = lambda: (["weight"], [consistency.checksum(weight)])  # noqa: E731
        try:
            return check_end_of_fit(SimpleNamespace(callbacks=[stopping]), checksums, [optimizer], communicator)
        except DriftError as error:
            return f"DriftError: {error}"

    first, second = on_thread_ranks(2, rank_of)
    assert first == second
    if which == "neither":
        assert first == ""
        return
    assert first.startswith("DriftError: when fit() ended the weights of rank") == (which != "decisions")
    decided = "decided differently" in first and "EarlyStopping.best_epoch (rank 0: 0, rank 1: 1)" in first
    assert decided == (which != "weights")
    assert "MetricAverageCallback" in first
