"""Memory that NCCL has registered: alike on all ranks, and freed when nothing uses it any more."""

import contextlib
import gc
import threading
from collections import deque

import pytest
import torch

from ring_plugins.core.base import config
from ring_plugins.core.gpu import registered
from ring_plugins.core.gradients.fusion import BucketSizes
from ring_plugins.torch import device
from ring_plugins.torch.gradient_buckets import GradientBuckets
from tests.gpu_stand_in import alone, pass_for_gpu
from tests.launch import run_ranks


@pytest.fixture
def gpu(monkeypatch):
    made = []

    def make(**options):
        communicator, library = alone("gradients", **options)
        pass_for_gpu(library, library.streams, monkeypatch.setattr)
        made.append(communicator)
        return communicator, library

    yield make
    for communicator in made:
        communicator.close()
    device.streams.cache_clear()
    registered._waiting.clear()
    registered._told.clear()


def test_a_window_is_deregistered_before_its_communicator_ends_and_freed_after_its_tensors(gpu):
    communicator, library = gpu()
    tensor = device.tensor_over(communicator.allocate_registered(64))
    view = tensor.view(torch.float32)[2:4]
    view.fill_(3)
    del tensor
    communicator.close()
    assert library.log == ["window", "deregister", "finalize", "destroy"]
    assert view.tolist() == [3, 3]
    other, _ = gpu()
    other.close()
    assert len(library.allocated) == 1  # the view lives
    del view
    gc.collect()
    gpu()[0].close()
    assert library.log[-1] == "free"
    assert not library.allocated


def test_memory_whose_tensors_are_gone_is_handed_out_again(gpu):
    communicator, library = gpu()
    first = communicator.allocate_registered(64)
    second = communicator.allocate_registered(64)
    assert first.pointer != second.pointer
    pointer = first.pointer
    del first
    again = communicator.allocate_registered(100)  # the same gradients in other buckets
    assert (again.pointer, again.nbytes) == (pointer, 100)
    assert len(library.allocated) == 2


def test_what_an_aborted_communicator_registered_is_never_freed(gpu):
    communicator, library = gpu()
    memory = communicator.allocate_registered(64)
    communicator.interrupt("step", KeyboardInterrupt())
    communicator.close()
    del memory
    gpu()[0].close()
    assert len(library.registered) == 1
    assert "free" not in library.log


def test_what_a_graph_captured_stays_registered(gpu):
    communicator, library = gpu()
    memory = communicator.allocate_registered(64)
    communicator.executor.queue.captured.append(object())
    communicator.close()
    del memory
    gpu()[0].close()
    assert len(library.registered) == 1
    assert not {"deregister", "free"} & set(map(str, library.log))


@pytest.mark.parametrize(("version", "said"), [(22700, ["window"]), (22605, ["register"]), (21803, [])])
def test_the_release_of_nccl_decides(gpu, version, said):
    communicator, library = gpu()
    communicator.executor.registered._nccl.version = version
    memory = communicator.allocate_registered(64)
    assert library.log == said
    assert (memory is None) == (version < 21900)


def test_gpus_without_windows_register_instead(gpu):
    communicator, library = gpu()
    library.has_windows = False
    memory = communicator.allocate_registered(64)
    assert memory is not None
    assert library.log == ["register"]


@pytest.mark.parametrize("is_on", [False, True])
def test_every_bucket_is_one_pointer_if_memory_is_registered(gpu, monkeypatch, is_on):
    monkeypatch.setenv("RING_NCCL_REGISTER", str(int(is_on)))
    assert config.NCCL_REGISTER.get() is is_on
    communicator, library = gpu()
    weights = [torch.nn.Parameter(torch.ones(600_000)), torch.nn.Parameter(torch.ones(8))]
    buckets = GradientBuckets(
        [("large", weights[0]), ("small", weights[1])], communicator, BucketSizes(2**25, 2**25), None, set(), True
    )
    for weight in weights:
        weight.grad = torch.full_like(weight, 2.0)
    for entry in range(2):
        buckets.reducer.mark_ready(entry, buckets.fill)
    buckets.finish()
    assert [weight.grad[0].item() for weight in weights] == [2.0, 2.0]
    assert library.log == (["window", ["all_reduce"]] if is_on else [["all_reduce", "all_reduce"]])
    if is_on:
        (start,) = library.allocated
        assert start <= weights[0].grad.data_ptr() < start + len(library.allocated[start])


SCENARIO = """
    import os
    import numpy as np
    import ring_plugins as ring
    from ring_plugins.core import world
    from tests.gpu_stand_in import install
    from tests.worker import report

    ring.init(ranks=int(os.environ["TEST_RANKS"]))
    library, streams = install()
    what, last = os.environ["TEST_WHAT"], ring.rank() == ring.size() - 1
    if what == "no window function" and last:
        library.without("ncclCommWindowRegister")
    if what == "no function" and last:
        library.without("ncclMemAlloc")
    if what == "no memory" and last:
        library.out_of_memory = True
    if what == "no registration":
        library.without("ncclCommWindowRegister")
        if last:
            library.fail("ncclCommRegister")
    communicator = world.current().new_device_communicator("test", 0, streams)
    if what == "window fails" and last:
        library.fail("ncclCommWindowRegister")
    sizes = 64 if what != "sizes" else 64 + 64 * ring.rank()
    try:
        kept = [communicator.allocate_registered(sizes)]
        if what == "one keeps its tensors":
            if last:
                kept.clear()
            kept.append(communicator.allocate_registered(sizes))
            del kept[0]
            kept.append(communicator.allocate_registered(sizes))
        report("none", [memory is None for memory in kept])
        report("log", list(library.log))
    except ring.RingError as error:
        report("error", str(error))
    ring.barrier()  # nobody hears of an error because a process has ended
    report("allocated", len(library.allocated))
    report("registered", len(library.registered))
"""


def run(what):
    return run_ranks(SCENARIO, 2, env={"TEST_WHAT": what, "RING_START_TIMEOUT": "40"}, timeout=100)


@pytest.mark.parametrize(
    ("what", "log", "allocated", "registered"),
    [
        ("all is well", ["window"], 1, 1),
        ("no window function", ["register"], 1, 1),
        ("no registration", None, 1, 0),
        ("no function", None, 0, 0),
        ("no memory", None, 0, 0),
    ],
)
def test_all_ranks_fall_back_alike(what, log, allocated, registered):
    result = run(what)
    assert result.values("none") == [[not allocated]] * 2
    assert result.values("allocated") == [allocated] * 2
    assert result.values("registered") == [registered] * 2
    if log is not None:
        assert result.values("log") == [log] * 2
    assert ("has no effect on rank 1" in result.output) == (log is None)


def test_memory_is_handed_out_again_only_if_it_is_free_on_all_ranks():
    result = run("one keeps its tensors")
    # The second call finds memory free on rank 1 only, and the third on both.
    assert result.values("log") == [["window"] * 2] * 2


def test_different_sizes_are_an_error_on_all_ranks_before_nccl_is_called():
    result = run("sizes")
    assert all("[64, 128] bytes of registered memory" in text for text in result.values("error"))
    assert result.values("allocated") == [0, 0]


def test_a_window_that_fails_on_one_rank_is_an_error_on_all():
    result = run("window fails")
    assert "ncclCommWindowRegister of NCCL" in result.values("error")[1]
    assert "rank 1" in result.values("error")[0]
    assert "within" not in result.values("error")[0]


def test_two_threads_free_memory_once(monkeypatch):
    """A communicator may be closed by the garbage collection of any thread, while another frees."""
    freed, others = [], []

    class Driver:
        def device(self, number):
            return contextlib.nullcontext()

        def synchronize(self):
            if not others:
                others.append(threading.Thread(target=registered.release_unused))
                others[0].start()
                others[0].join()

    class Library:
        def call(self, name, pointer):
            freed.append(pointer)

    blocks = [registered._Block(pointer, 64) for pointer in (4096, 8192)]
    monkeypatch.setattr(registered, "_waiting", deque((Library(), Driver(), 0, block) for block in blocks))
    registered.release_unused()
    assert sorted(freed) == [4096, 8192]
