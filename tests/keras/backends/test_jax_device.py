"""NCCL reduces the buffers of JAX's compiled steps, in order with XLA's stream; stand-ins for GPU, NCCL and XLA."""

import importlib.util
import os
import threading

import numpy as np
import pytest
import torch

from ring_plugins.core.base.errors import DeviceError, RingError
from tests import gpu_stand_in
from tests.keras.launches import START, environment
from tests.launch import run_ranks

JAX_ON_CUDA = ("jax_cuda12_plugin", "jax_cuda13_plugin")


class Buffer:
    """As XLA passes it: DLPack's description of an array."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self):
        return self.array.__dlpack__()


class Xla:
    """What XLA tells a call of its stream, if it has one."""

    def __init__(self, stream):
        self.handle = stream

    @property
    def stream(self):
        if not self.handle:
            raise RuntimeError("no stream here")
        return self.handle

    def call(self, callback, operands, results=None):
        results = operands if results is None else results
        callback(self, [*map(Buffer, results)], *map(Buffer, operands))


class Step:
    """A traced step of two buckets, of a large gradient and of two small ones, and what XLA calls in it."""

    def __init__(self, monkeypatch):
        import jax

        from ring_plugins.core.gpu import cuda
        from ring_plugins.core.gradients.fusion import BucketSizes, Entry
        from ring_plugins.keras.backends import jax_device

        streams = jax_device.XlaStreams()
        self.communicator, self.nccl = gpu_stand_in.alone("gradients", streams=streams)
        self.library = self.nccl.cuda
        driver = cuda.Driver(self.library)
        monkeypatch.setattr(jax_device, "load_driver", lambda: driver)
        monkeypatch.setattr(self.library, "cuCtxSynchronize", None)  # nobody waits for the GPU
        entries = [Entry("a", "float32", 3), Entry("b", "float32", 4), Entry("c", "float32", 40)]
        connection = jax_device.Connection(self.communicator, streams)
        self.buckets = jax_device.DeviceBuckets(entries, connection, BucketSizes(28, 28, 100))
        ones = {i: jax.numpy.ones(entry.count) for i, entry in enumerate(entries)}
        self.program = jax.make_jaxpr(self.buckets.average)(ones)
        calls = [one for one in self.program.eqns if one.primitive.name == "buffer_callback"]
        self.first, self.second, self.averages = (call.params["callback"] for call in calls)
        with driver.device(0):
            self.stream = driver.new_stream(0)
        self.work = self.library.streams[self.stream].work  # what XLA has queued
        self.xla = Xla(self.stream)


@pytest.fixture
def step(monkeypatch):
    pytest.importorskip("jax")
    pytest.importorskip("keras")
    made = Step(monkeypatch)
    yield made
    made.buckets.release()


def test_nccl_reduces_in_order_with_xlas_stream_and_the_host_does_not_wait(step, monkeypatch):
    large, small, gate, seen = np.zeros(40, "float32"), np.zeros(7, "float32"), threading.Event(), []

    def double(self, collected):
        for _, _, receive, count, kind, _ in collected:
            gpu_stand_in.memory(receive, count, kind)[:] *= 2

    monkeypatch.setattr(gpu_stand_in.Communicator, "kernel", double)
    for number in range(2):
        gate.clear()
        step.work.put(gate.wait)
        step.work.put(lambda: large.fill(1))
        step.xla.call(step.first, [large])
        step.work.put(lambda: small.fill(3))
        step.xla.call(step.second, [small])
        step.xla.call(step.averages, [large, small])
        step.work.put(lambda: seen.append((large.copy(), small.copy())))
        assert len(seen) == number and step.communicator.executor.queue.oldest is not None  # nothing is done yet
        gate.set()
        step.library.streams[step.stream].drain()
        assert seen[-1][0].tolist() == [2] * 40 and seen[-1][1].tolist() == [6] * 7
    assert [calls for calls in step.nccl.log if calls == ["all_reduce"]] == [["all_reduce"]] * 4
    assert (step.buckets.reducer.passes, step.buckets.reducer.reduced_bytes) == (2, 2 * 47 * 4)


def test_the_traced_program_lets_calls_overwrite_gradients(step):
    assert str(step.program).count("buffer_callback[") == 3 and "((0, 0), (1, 1))" in str(step.program)


def test_gradients_are_scaled_without_rounding_the_factor():
    jax = pytest.importorskip("jax")
    from ring_plugins.keras.backends import jax_device

    numbers = jax.random.uniform(jax.random.key(0), 4096, "bfloat16", 1, 2)  # which would round 1/3
    ratios = np.asarray(jax_device._scaled(numbers, 1 / 3), "float64") * 3 / np.asarray(numbers, "float64")
    assert abs(ratios.mean() - 1) < 2e-4


def test_a_jax_without_buffer_callback_is_rejected(monkeypatch):
    pytest.importorskip("jax")
    from ring_plugins.core.base.errors import ArgumentError
    from ring_plugins.core.collectives.single import SingleCommunicator
    from ring_plugins.keras.backends import jax_device

    monkeypatch.setenv("RING_JAX_NCCL", "1")
    assert jax_device.connect("gradients", SingleCommunicator("gradients")) is None  # there is no GPU
    monkeypatch.setattr(jax_device, "computes_on_gpus", lambda: True)
    monkeypatch.setattr(jax_device, "has_buffer_callback", lambda: False)
    with pytest.raises(ArgumentError, match=r"needs jax.experimental.buffer_callback, which JAX .* lacks; upgrade"):
        jax_device.connect("gradients", SingleCommunicator("gradients"))


def test_without_a_stream_the_step_fails_with_xlas_words(step):
    step.xla.handle = 0
    with pytest.raises(DeviceError, match="XLA has no CUDA stream for this step: no stream here"):
        step.xla.call(step.first, [np.zeros(40, "float32")])


def test_memory_that_xla_has_moved_ends_the_job(step):
    large, small = np.ones(40, "float32"), np.ones(7, "float32")
    step.xla.call(step.first, [large])
    step.xla.call(step.second, [small])
    with pytest.raises(DeviceError, match="XLA has moved gradients that NCCL works on; set RING_JAX_NCCL=0"):
        step.xla.call(step.averages, [large, small.copy()])
    with pytest.raises(RingError, match="is out of step with the other ranks"):
        step.xla.call(step.first, [large])


def test_a_result_with_other_memory_than_its_operand_is_rejected(step):
    with pytest.raises(DeviceError, match="other memory than the operand"):
        step.xla.call(step.first, [np.ones(40, "float32")], [np.ones(40, "float32")])


def test_a_missing_gradient_is_rejected(step):
    import jax

    from ring_plugins.core.base.errors import ArgumentError

    with pytest.raises(ArgumentError, match="no gradient for b. RING_JAX_NCCL=1 needs one for every variable"):
        step.buckets.average({0: jax.numpy.ones(3), 2: jax.numpy.ones(40)})


FIT = (
    START
    + """
cards = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
os.environ["CUDA_VISIBLE_DEVICES"] = cards[ring.local_rank() % len(cards)]
SIMULATED = "RING_SIMULATED_HOST_MEMORY" in os.environ
if SIMULATED:
    from tests.gpu_rehearsal.devices import count, load

    load()

import time

import keras
import numpy as np

from ring_plugins.core.gpu import load_driver
from ring_plugins.keras import BroadcastCallback, DistributedOptimizer
from ring_plugins.keras.averaging import averaging_of
from ring_plugins.keras.backends import jax_device, jax_ffi
from tests.worker import report

rank, size = ring.rank(), ring.size()
if SIMULATED:
    # The CPU has no stream, so it waits for those of the GPU.
    def call_and_wait(function, operands, call=jax_device.call_on_gpu):
        def calls(stream, pointers):
            function(stream, pointers)
            with load_driver().device(0):
                load_driver().synchronize()

        return call(calls, operands)

    jax_device.call_on_gpu = call_and_wait
    jax_device.computes_on_gpus = lambda: True
    jax_ffi.stream_of = lambda context: 0
rng = np.random.default_rng(0)
x, y = rng.normal(size=(48, 5)).astype("float32"), rng.normal(size=(48, 1)).astype("float32")
seen = []


class Look(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        buckets = averaging_of(self.model.optimizer).exchange.buckets
        seen.append((type(buckets).__name__, len(buckets.plan.buckets)))


def fitted(averages, steps=None, uneven=False, **options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(40, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=steps), "mse", **options)
    batches, callbacks = [(x[i : i + 12], y[i : i + 12]) for i in range(0, 48, 12)], []
    if uneven:  # rank 0 has five batches of six samples, rank 1 has three
        parts = [[(x[i : i + 6], y[i : i + 6]) for i in range(*ends, 6)] for ends in ((0, 30), (30, 48))]
        whole = [tuple(map(np.concatenate, zip(*(part[i] for part in parts if i < len(part))))) for i in range(5)]
        if averages:
            model.optimizer = DistributedOptimizer(model.optimizer, bucket_bytes=100)
            callbacks = [BroadcastCallback(), Look()]
        model.fit((batch for batch in (parts[rank] if averages else whole)), verbose=0, callbacks=callbacks)
        return np.concatenate([np.ravel(weight) for weight in model.get_weights()])
    if averages:
        model.optimizer = DistributedOptimizer(model.optimizer, bucket_bytes=100)
        batches = [[part[rank * 12 // size : (rank + 1) * 12 // size] for part in batch] for batch in batches]
        callbacks = [BroadcastCallback(), Look()]
    mine = [np.concatenate(parts) for parts in zip(*batches)]
    model.fit(*mine, batch_size=len(mine[0]) // 4, shuffle=False, epochs=2, verbose=0, callbacks=callbacks)
    return np.concatenate([np.ravel(weight) for weight in model.get_weights()])


for name, options in {
    "compiled": {}, "eager": {"run_eagerly": True}, "accumulated": {"steps": 2}, "uneven": {"uneven": True},
}.items():
    alone = fitted(False, **options)
    before = SIMULATED and count("ncclAllReduce")
    ours = fitted(True, **options)
    report(name, float(np.abs(ours - alone).max()))
    report(name + " equal", len(set(ring.all_gather_object(ours.tobytes()))))
    report(name + " by NCCL", SIMULATED and count("ncclAllReduce") - before)
report("seen", seen)

# A gradient on some ranks only.
optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1))
variables = [keras.Variable(np.ones(3, "float32")), keras.Variable(np.ones(2, "float32"))]
optimizer.build(variables)
optimizer.apply([np.ones(3, "float32"), np.ones(2, "float32")], variables)
try:
    optimizer.apply([np.ones(3, "float32"), None if rank == 1 else np.ones(2, "float32")], variables)
    began = time.monotonic()
    while time.monotonic() < began + 30:
        averaging_of(optimizer).exchange.buckets._communicator.check()
        time.sleep(0.05)
except Exception as error:
    report("rejected", str(error))
"""
)


def check_equality(**more):
    result = run_ranks(FIT, 2, env=environment("jax", RING_JAX_NCCL="1", **more), timeout=250)
    for name in ("compiled", "eager", "accumulated", "uneven"):
        assert max(result.values(name)) < 1e-5
        assert result.values(f"{name} equal") == [1, 1]
    assert {tuple(entry) for entry in result.values("seen")[0]} == {("DeviceBuckets", 3)}
    assert "no gradient for variable 1" in result.values("rejected")[1]
    assert "rank 1 rejected the arguments of averaging gradients" in result.values("rejected")[0]
    return result


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU here")
@pytest.mark.skipif(
    not (importlib.util.find_spec("keras") and any(map(importlib.util.find_spec, JAX_ON_CUDA))),
    reason="Keras, or JAX for CUDA, is not installed",
)
def test_the_same_on_a_card():
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count()))))
    check_equality(
        XLA_FLAGS="",
        JAX_PLATFORMS="cuda",
        JAX_DEFAULT_MATMUL_PRECISION="highest",
        XLA_PYTHON_CLIENT_PREALLOCATE="false",
        CUDA_VISIBLE_DEVICES=visible,
        RING_SHARE_GPU="1" if torch.cuda.device_count() < 2 else "0",
    )
