"""Horovod's `RayExecutor` keeps its ranks between calls, on a local cluster."""

import importlib.util

import pytest

from ring_plugins.core.base.errors import ArgumentError, LaunchError
from tests.launch import run_ranks

SCRIPT = """
    import os, signal
    import ray
    import ring_plugins as ring
    from ring_plugins.horovod.ray import RayExecutor
    from tests.worker import report

    def train(factor, offset=0):
        import numpy as np
        import ring_plugins.horovod.torch as hvd
        import torch

        hvd.init()
        return [os.getpid(), hvd.rank(), float(hvd.allreduce(torch.tensor([hvd.rank() * factor + offset]))[0])]

    class Executable:
        def __init__(self, factor):
            self.factor, self.size = factor, os.environ["SIZE"]

    def fails(executable):
        import ring_plugins.horovod.torch as hvd

        if hvd.rank() == 1:
            raise ValueError("on purpose")
        hvd.barrier()

    def is_lost():
        import ring_plugins.horovod.torch as hvd

        hvd.init()
        if hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.barrier()
        return hvd.size()

    ray.init(num_cpus=2)
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=60, nics={"lo"}), num_hosts=1, num_workers_per_host=2)
    executor.start(Executable, [3], extra_env_vars={"SIZE": 5})
    report("first", executor.run(train, args=[2.0]), rank=0)
    report("second", ray.get(executor.run_remote(train, args=[2.0], kwargs={"offset": 1})), rank=0)
    report("made", executor.execute(lambda executable: [executable.factor, executable.size]), rank=0)
    report("single", executor.execute_single(lambda executable: os.environ["RANK"]), rank=0)
    try:
        executor.execute(fails)
    except ValueError as error:  # Ray's error, which is of the function's type, too
        report("failed", str(error), rank=0)
    executor.shutdown()
    executor.start()
    report("third", executor.run(train, args=[2.0]), rank=0)
    executor.shutdown()
    elastic = RayExecutor(RayExecutor.create_settings(timeout_s=60), min_workers=1, max_workers=2)
    elastic.start(extra_env_vars={"SIZE": 5})
    report("lost", elastic.run(is_lost), rank=0)
    report("executed", elastic.execute(lambda executable: [executable, os.environ["SIZE"]]), rank=0)
    elastic.shutdown()
    group = ray.util.placement_group([{"CPU": 1}] * 2)
    ray.get(group.ready())

    @ray.remote(num_cpus=0)
    def inside():
        executor = RayExecutor(num_workers=2)
        executor.start()
        try:
            return executor.run(train, args=[2.0])
        finally:
            executor.shutdown()

    where = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        group, placement_group_capture_child_tasks=True
    )
    report("inside", ray.get(inside.options(scheduling_strategy=where).remote()), rank=0)
"""

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_stay_between_calls_until_they_are_shut_down(monkeypatch):
    monkeypatch.setattr("tests.launch.GRACE_SECONDS", 20.0)
    found = run_ranks(SCRIPT, 2, env={"RAY_USAGE_STATS_ENABLED": "0"}, timeout=400).reports[0]
    for name, average in (("first", 1.0), ("second", 2.0), ("third", 1.0), ("inside", 1.0)):
        assert [one[1:] for one in found[name]] == [[0, average], [1, average]]
    processes = [[one[0] for one in found[name]] for name in ("first", "second", "third")]
    assert processes[0] == processes[1] and not set(processes[0]) & set(processes[2])
    assert found["made"] == [[3, "5"]] * 2 and found["single"] == "0" and "on purpose" in found["failed"]
    assert found["lost"] == [1] and found["executed"] == [[None, "5"]] * 2


@pytest.fixture
def executor(monkeypatch):
    from ring_plugins.horovod.ray import runner

    monkeypatch.setattr(runner, "connect_to_ray", lambda: None)
    return runner.RayExecutor


def test_numbers_that_contradict_each_other_are_rejected(executor):
    for options, said in (
        ({}, "num_workers=None, num_hosts=None, min_workers=None: pass one of them"),
        ({"num_workers": 2, "min_workers": 1}, "num_workers=2, num_hosts=None, min_workers=1: pass one"),
        ({"num_workers": 2, "max_workers": 4}, "max_workers=4 needs min_workers="),
        ({"num_workers": 0}, "num_workers=0 is not a positive number"),
    ):
        with pytest.raises(ArgumentError, match=said):
            executor(None, **options)


def test_a_call_without_ranks_says_what_starts_them(executor):
    for call in (executor(None, 2).run, executor(None, min_workers=1).run, executor(None, 2).execute_single):
        with pytest.raises(LaunchError, match=r"call start\(\) before"):
            call(print)
    with pytest.raises(ArgumentError, match=r"run_remote\(\) has no ranks to call"):
        executor(None, min_workers=1).run_remote(print)
    with pytest.raises(ArgumentError, match="make the object in the function"):
        executor(None, min_workers=1).start(dict)


def test_what_does_not_exist_on_ray_says_what_to_use():
    from ring_plugins.horovod import ray

    with pytest.raises(AttributeError, match="min_workers=2"):
        ray.ElasticRayExecutor  # noqa: B018
