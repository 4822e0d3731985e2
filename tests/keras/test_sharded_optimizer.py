"""Sharded optimizers keep their share, save the ordinary format, and refuse what they cannot do right."""

import re

import pytest

from tests.keras.launches import BACKENDS, on_ranks
from tests.launch import run_ranks


@on_ranks("state_of_a_sharded_optimizer", "torch", slow=("tensorflow", "jax"))
def test_a_rank_keeps_its_share_and_the_root_all_when_fit_is_over(seen):
    for found in seen:
        assert found["share"] == pytest.approx(0.5, abs=0.02)
    first, second = seen
    assert first["after"] == pytest.approx(1.0, abs=0.001)
    assert second["after"] < 0.001
    assert (first["saves"], first["steps"], first["own"]) == ("none", "none", [])
    assert first["distributes"] == "none"
    for text in (second["saves"], second["steps"], second["distributes"]):
        assert "RingError: fit() with a sharded optimizer has left the whole state on rank 0; rank 1 has none" in text
    assert first["broadcast"] == second["broadcast"]
    assert len(first["broadcast"]) > 10


@on_ranks("files_of_a_sharded_optimizer", "torch", slow=("tensorflow", "jax"))
def test_files_have_the_ordinary_format_and_training_continues_from_them(seen):
    first, second = seen
    assert len(first["state"]) > 10
    assert max(first["state"]) < 1e-5
    assert first["same shapes"]
    assert first["continues"] and second["continues"]
    assert first["weights"] == second["weights"]


@on_ranks("own_loop_of_a_sharded_optimizer", "torch", slow=("tensorflow", "jax"))
def test_a_loop_of_the_scripts_own(seen):
    first, second = seen
    assert first["sums"] == second["sums"]
    for found in seen:
        assert max(found["weights"]) <= 1e-6
        assert max(found["state"]) <= 1e-6
        assert found["continues"]
        assert found["share"] == pytest.approx(0.5, abs=0.02)
        assert found["whole"] == pytest.approx(1.0, abs=0.001)
        assert found["own"] == []


@on_ranks("state_that_only_the_root_has_loaded", slow=BACKENDS)
def test_the_state_that_only_the_root_has_loaded(seen):
    for found in seen:
        assert found["equal"]
        assert "MismatchError: before the first step the weights of rank " in found["different"]


@on_ranks("rejected_by_a_sharded_optimizer", slow=BACKENDS)
def test_what_sharded_optimizers_reject(seen):
    for found in seen:
        for name in ("adafactor", "lamb", "own"):
            assert "ArgumentError: shard_optimizer=True cuts variables into parts" in found[name]
        assert "ArgumentError: this Adam was passed to DistributedOptimizer without shard_optimizer" in found["plain"]
        assert "ArgumentError: ModelCheckpoint('model.h5') would save only a part" in found["format"]
        # The check of all options says it first where it runs with the step; on JAX the sharded update itself says it.
        assert re.search(r"MismatchError: .*learning.rate (differs|is) .*0\.001.*0\.5", found["rate"], re.DOTALL)


@on_ranks("sharded_fit_after_an_exception", slow=BACKENDS)
def test_a_fit_after_an_exception_goes_on_with_the_parts(seen):
    first, second = seen
    assert "one rank only" in second["error"] and first["error"] != "none"
    for found in seen:
        assert "an exception has ended its last fit" in found["saves"]
        assert found["steps"] == 8
    assert first["weights"] == second["weights"]
    assert first["whole"] == pytest.approx(1.0, abs=0.001)


@pytest.mark.slow
def test_jobs_that_go_on_without_a_rank_reject_sharded_optimizers():
    script = """
    import os
    import ring_plugins as ring
    ring.init(ranks=int(os.environ["TEST_RANKS"]), on_failure="continue")
    import keras
    from ring_plugins.keras import DistributedOptimizer
    from tests.worker import report
    try:
        DistributedOptimizer(keras.optimizers.Adam(), shard_optimizer=True)
    except Exception as error:
        report("error", f"{type(error).__name__}: {error}")
    """
    result = run_ranks(script, 2, env={"KERAS_BACKEND": "torch"}, timeout=120, check=False)
    for text in result.values("error"):
        assert 'a sharded optimizer, whose state is lost with a rank, does not support on_failure="continue"' in text
    assert len(result.values("error")) == 2
