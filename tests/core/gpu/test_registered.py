"""Memory that NCCL has registered: alike on all ranks, and freed when nothing uses it any more."""

import contextlib
import gc
import threading
from collections import deque

import pytest
import torch

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import RingError
from ring_plugins.core.gpu import registered
from ring_plugins.core.gradients.fusion import BucketSizes
from ring_plugins.torch import device
from ring_plugins.torch.gradient_buckets import GradientBuckets
from tests.gpu_stand_in import alone, on_gpus, pass_for_gpu


@pytest.fixture
def gpu(monkeypatch):
    made = []

    def make(**options):
        communicator, library = alone("gradients", **options)
        pass_for_gpu(library.streams, monkeypatch.setattr)
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


def on_ranks(prepare, function, size=2):
    """Call `function(communicator)` on ranks that `prepare(rank, its NCCL)` makes unlike; returns logs, or errors."""

    def of_rank(rank, communicator, library):
        prepare(rank, library)
        try:
            kept = function(rank, communicator)
            return kept is None, library.log[:], len(library.allocated), len(library.registered)
        except RingError as error:
            return str(error), library.log[:], len(library.allocated), len(library.registered)

    registered._told.clear()
    return on_gpus(size, of_rank)


@pytest.mark.parametrize(
    ("lacks", "fails", "log", "allocated", "registered"),
    [
        ("", "", ["window"], 1, 1),
        ("ncclCommWindowRegister", "", ["register"], 1, 1),
        ("", "ncclCommRegister", None, 1, 0),
        ("ncclMemAlloc", "", None, 0, 0),
        ("", "ncclMemAlloc", None, 0, 0),
    ],
)
def test_all_ranks_fall_back_alike(caplog, lacks, fails, log, allocated, registered):
    def prepare(rank, library):
        if rank == 1 and lacks:
            library.without(lacks)
        if rank == 1 and fails:
            library.fail(fails)
        if fails == "ncclCommRegister":
            library.without("ncclCommWindowRegister")

    found = on_ranks(prepare, lambda rank, communicator: communicator.allocate_registered(64))
    assert [(none, *counts) for none, _, *counts in found] == [(not allocated, allocated, registered)] * 2
    if log is not None:
        assert [logged for _, logged, *_ in found] == [log] * 2
    assert ("has no effect on rank 1" in caplog.text) == (log is None)


def test_memory_is_handed_out_again_only_if_it_is_free_on_all_ranks():
    def allocate(rank, communicator):
        kept = [communicator.allocate_registered(64)]
        if rank == 1:
            kept.clear()
        kept.append(communicator.allocate_registered(64))  # finds memory free on rank 1 only
        del kept[0]
        kept.append(communicator.allocate_registered(64))  # and on both
        return kept

    for _, log, *_ in on_ranks(lambda rank, library: None, allocate):
        assert log == ["window"] * 2


def test_different_sizes_are_an_error_on_all_ranks_before_nccl_is_called():
    found = on_ranks(
        lambda rank, library: None, lambda rank, communicator: communicator.allocate_registered(64 + 64 * rank)
    )
    assert all("[64, 128] bytes of registered memory" in text for text, *_ in found)
    assert [allocated for _, _, allocated, _ in found] == [0, 0]


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
