"""The codecs: rounding, error feedback, and bytes on the network."""

import numpy as np
import pytest

from ring_plugins.core.arrays.codec import CODECS, CodecKind, Compression, HalfCodec, Int8Codec, RoundingCodec
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.gradients.fusion import BucketSizes, Entry, FusionBuffer, FusionPlan
from ring_plugins.core.gradients.reducer import GradientReducer, is_filled
from ring_plugins.core.gradients.trials import Choice
from tests.core.collectives.simulated_hosts import simulated_communicators
from tests.launch import run_ranks


def test_names():
    assert Compression.named(None) is None
    assert Compression.named("fp16") == ("fp16", False)
    assert Compression.named("bf16", error_feedback=True) == ("bf16", True)
    assert Compression.named("int8") == ("int8", True)
    assert Compression.named("int8", error_feedback=False) == ("int8", False)
    with pytest.raises(ArgumentError, match="compression='int4'"):
        Compression.named("int4")
    with pytest.raises(ArgumentError, match="error_feedback=True needs"):
        Compression.named(None, error_feedback=True)


@pytest.mark.parametrize("storage", [np.float32, np.float64])
@pytest.mark.parametrize(("name", "bits"), [("fp16", 11), ("bf16", 8)])
def test_packing_rounds_to_half_a_unit_and_a_result_stays_what_it_is(name, bits, storage):
    whole = np.random.default_rng(0).normal(size=100).astype(storage)
    codec = Compression.named(name, error_feedback=True).codec()
    codec.begin(whole)
    piece = whole[10:60]
    exact = piece.copy()
    packed = codec.pack(piece)
    assert packed.nbytes == 100
    codec.unpack(packed, piece)
    assert np.all(abs(piece - exact) <= abs(exact) * 2.0**-bits)
    assert np.array_equal(codec.pack(piece), packed)  # as it is sent to others


def test_error_feedback_loses_nothing_over_many_steps():
    values = np.full(3, 1 + 2**-10, np.float32)  # which bfloat16 rounds to 1
    for feedback, mean in ((False, 1.0), (True, 1 + 2**-10)):
        codec = HalfCodec("bfloat16", feedback)
        total = np.zeros(3)
        for _ in range(1024):
            array = values.copy()
            codec.begin(array)
            codec.unpack(codec.pack(array), array)
            total += array
        assert np.allclose(total / 1024, mean, atol=2**-17)


def test_a_reduction_that_is_repeated_adds_the_errors_of_the_one_before_it():
    codec = HalfCodec("bfloat16", True, can_undo=True)
    array, half = np.full(10, 1 + 2**-10, np.float32), np.full(5, 1 + 2**-9 + 2**-10, np.float32)
    codec.begin(array)
    codec.pack(array)
    codec.begin(array)
    packed = [codec.pack(array[:6]), codec.pack(array[6:])]
    codec.undo()
    array[:5] = half  # after a loss, a member may reduce other pieces
    codec.begin(array)
    codec.pack(array[:5])
    codec.undo()
    array[:5] = array[5:]
    codec.begin(array)
    assert np.array_equal(np.concatenate([codec.pack(array[:6]), codec.pack(array[6:])]), np.concatenate(packed))


def test_an_overflow_is_seen_once():
    codec = HalfCodec("float16", True)
    array = np.array([1e6, 1.0], np.float32)
    codec.begin(array)
    codec.unpack(codec.pack(array), array)
    assert np.isinf(array[0])
    array[:] = 2.0
    codec.begin(array)
    codec.unpack(codec.pack(array), array)
    assert array.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("storage", [np.float32, np.float64])
@pytest.mark.parametrize("count", [1, 15, 16, 17, 1000, 10_003])
@pytest.mark.parametrize("scale", [1, 1e-3, 1e-30, 1e-37, 1e30])
def test_int8_errs_by_a_fraction_of_the_largest_in_a_cache_line_and_never_twice(storage, count, scale):
    array = (np.random.default_rng(0).normal(size=count) * scale).astype(storage)
    line = 64 // array.itemsize
    codec, rounded = Int8Codec(), np.empty_like(array)
    codec.begin(array)
    packed = codec.pack(array)
    assert packed.nbytes == count + -(-count // line)
    codec.unpack(packed, array, into=rounded)
    for start in range(0, count, line):
        cut = slice(start, start + line)
        assert abs(rounded[cut] - array[cut]).max() <= abs(array[cut]).max() / 127 + 2.0**-126
    codec.begin(rounded)
    for cut in (slice(0, count // 2 // line * line), slice(count // 2 // line * line, count)):  # as other ranks may
        piece = rounded[cut]
        again = np.empty_like(piece)
        codec.unpack(codec.pack(piece), piece, into=again)
        assert np.array_equal(again, piece)


def test_int8_shows_what_is_no_finite_number_and_keeps_zeros():
    array = np.ones(64, np.float32)
    array[3], array[20], array[32:48] = np.inf, np.nan, 0
    codec = Int8Codec(error_feedback=True)
    codec.begin(array)
    codec.round(array)
    assert np.isnan(array[:32]).all()
    assert set(array[32:48].tolist()) == {0.0}
    assert set(array[48:].tolist()) == {1.0}
    array[:] = 0.5
    codec.begin(array)
    codec.round(array)
    assert set(array.tolist()) == {0.5}  # nothing of an overflow is added to later steps


@pytest.mark.parametrize("name", list(CODECS))
def test_the_end_of_a_bucket_is_sent_as_it_is(name):
    array = np.full(48, 1 / 3, np.float32)
    array[32:] = np.linspace(0, 1, 16) / 3
    exact = array[32:].copy()
    codec = Compression.named(name, error_feedback=True).codec()
    for cut in (slice(0, 48), slice(16, 48), slice(32, 48)):
        codec.begin(array, 32)
        piece = array[cut]
        codec.round(piece)
        assert np.array_equal(array[32:], exact)
        assert len(codec.pack(piece)) == len(codec.receive_buffer(piece))
    assert abs(array[0] - 1 / 3) < 2e-3


@pytest.mark.parametrize("name", list(CODECS))
def test_a_result_is_rounded_once_and_sent_as_it_was_rounded(name):
    array = np.random.default_rng(0).normal(size=640).astype(np.float32)
    codec = Compression.named(name, error_feedback=True).codec()
    codec.begin(array)
    codec.round(array[64:128])
    after = array[64:128].copy()
    data = codec.pack(array[64:128])
    codec.unpack(data, array[64:128])
    assert np.array_equal(array[64:128], after)


class Exponents(RoundingCodec):
    """A made-up `Codec` of one byte: the sign, and the next lower power of two."""

    def __str__(self):
        return "as exponents"

    def _nbytes(self, count, line):
        return count

    def _encode(self, values, line, data):
        fraction, exponent = np.frexp(values)
        data.view(np.int8)[:] = np.where(values == 0, 0, np.sign(fraction) * (exponent + 64))

    def _decode(self, data, line, values):
        whole = data.view(np.int8).astype(np.int32)
        np.copyto(values, np.sign(whole) * np.ldexp(np.float32(0.5), abs(whole) - 64))


@pytest.mark.parametrize("count", [100, 60_000])
@pytest.mark.parametrize("hosts", [(0, 0), (0, 0, 0, 0), (0, 1), (0, 0, 1, 1), (0, 1, 2, 2)], ids=str)
def test_a_codec_is_added_by_an_entry_in_the_table(monkeypatch, hosts, count):
    monkeypatch.setitem(CODECS, "exponents", CodecKind(Exponents, ("float32",)))
    compression = Compression.named("exponents")
    plan = FusionPlan([Entry("w", "float32", count, str(compression))], BucketSizes(64, 64))
    between_hosts = len(set(hosts)) > 1

    def passes(rank, communicator):
        buffer = FusionBuffer(plan, communicator)
        reducer = GradientReducer(buffer, communicator, compression=Choice(compression))
        found = []
        for step in range(2):
            buffer.memories[0].array[:] = 2.0**step
            reducer.mark_ready(0, is_filled)
            reducer.finish(is_filled)
            found.append(buffer.memories[0].array[:count].copy())
        return found

    with simulated_communicators(hosts) as job:
        results = job.on_all(passes)
        most = max(nbytes for transport in job.transports for _, nbytes in transport.sent) if between_hosts else 0
    for found in results:
        assert [set(averages.tolist()) for averages in found] == [{1.0}, {2.0}]
    assert most < count + 1024  # a byte for each number
    assert compression.needs_host  # gradients of GPUs go there to be rounded so


BETWEEN_HOSTS = """
import os
import numpy as np
import torch
import ring_plugins as ring
from ring_plugins.core import world
from ring_plugins.core.arrays.codec import Compression, HalfCodec
from ring_plugins.core.arrays.memory import HostMemory
from ring_plugins.core.gradients import trials
from ring_plugins.torch import DistributedOptimizer
from tests.worker import report

ring.init(ranks=int(os.environ["TEST_RANKS"]))
transport = world.current()._rendezvous.transport
sent, exchange = [0], transport.exchange


def counting(outgoing, incoming, tag):
    sent[0] += sum(array.nbytes for _, array in outgoing)
    return exchange(outgoing, incoming, tag)


transport.exchange = counting
communicator = world.current().new_communicator("test")
for name in (None, "fp16", "bf16"):
    compression = Compression.named(name)
    gradient = np.random.default_rng(ring.rank()).normal(size=300_000).astype(np.float32)
    exact = np.mean([np.random.default_rng(r).normal(size=300_000).astype(np.float32) for r in range(ring.size())], 0)
    codec = compression.codec() if compression else None
    if codec:
        codec.begin(gradient)
    sent[0] = 0
    communicator.all_reduce(HostMemory(gradient, "float32"), ring.AVERAGE, codec)
    report(f"{name} bytes", sent[0])
    report(f"{name} error", float(abs(gradient - exact).max()))
    report(f"{name} sum", gradient.view(np.uint32).astype(np.uint64).sum().item())
# The sum of all ranks is above what float16 holds, their average is not.
large = np.full(100_000, 40_000.0, np.float32)
codec = HalfCodec("float16")
codec.begin(large)
communicator.all_reduce(HostMemory(large, "float32"), ring.AVERAGE, codec)
report("large", [float(large.min()), float(large.max())])


def train(**options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.ReLU(), torch.nn.Linear(300, 1))
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.002), model.named_parameters(), **options)
    for step in range(20):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + ring.rank()))
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    optimizer.close()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


exact = train()
for name in ("fp16", "bf16"):
    for feedback in (False, True):
        weights = train(compression=name, error_feedback=feedback)
        report(f"{name} {feedback}", float((weights - exact).abs().max()))
        report(f"{name} {feedback} weights", weights.view(torch.int32).long().sum())

trials._WARM_UP, trials._TURNS, trials._STEPS, ways = 0, 1, 2, []
ended = trials.MeasuredCompression.pass_ended
trials.MeasuredCompression.pass_ended = lambda self, now: (ways.append(self.now and self.now.name), ended(self, now))
weights = train(compression="auto")
report("auto error", float((weights - exact).abs().max()))
report("auto weights", weights.view(torch.int32).long().sum())
report("auto ways", ways)
"""


@pytest.mark.slow
@pytest.mark.mpi
def test_between_hosts_half_the_bytes_travel_and_all_ranks_get_the_same_bits():
    result = run_ranks(BETWEEN_HOSTS, 4, "mpirun", env={"RING_VIRTUAL_NODES": "2"})
    exact_bytes, half, brain = (result.values(f"{name} bytes") for name in (None, "fp16", "bf16"))
    for whole, one, other in zip(exact_bytes, half, brain, strict=True):
        assert one == other
        assert whole / 2 <= one < whole / 2 + 4096  # and some headers
    for name, error in ((None, 1e-6), ("fp16", 2**-10), ("bf16", 2**-7)):
        assert max(result.values(f"{name} error")) < 2 * error
        assert len(set(result.values(f"{name} sum"))) == 1
    assert result.values("large") == [[40_000.0] * 2] * 4
    for name in ("fp16", "bf16"):
        for feedback in (False, True):
            assert 0 < max(result.values(f"{name} {feedback}")) < 0.02
            assert len(set(result.values(f"{name} {feedback} weights"))) == 1
    assert 0 < max(result.values("auto error")) < 0.05
    assert len(set(result.values("auto weights"))) == 1
    ways = result.values("auto ways")
    assert ways == [ways[0]] * 4
    assert [ways[0][:6].count(way) for way in (None, "bf16", "int8")] == [2, 2, 2]
