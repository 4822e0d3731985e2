"""Where tensors are, without a GPU."""

import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.torch import device
from ring_plugins.torch.device import TorchStreams, is_on_gpu, is_supported, memory_of


def test_memory_is_the_tensors_own():
    tensor = torch.arange(4.0)
    memory = memory_of(tensor)
    memory.array[1] = 7
    assert tensor.tolist() == [0, 7, 2, 3]


def test_one_byte_types_that_the_core_does_not_know_travel_as_bytes():
    assert memory_of(torch.zeros(3, dtype=torch.float8_e4m3fn)).dtype == "uint8"
    assert memory_of(torch.zeros(3, dtype=torch.bool)).dtype == "bool"


def test_kinds_of_devices():
    assert is_supported(torch.zeros(1)) and not is_on_gpu(torch.zeros(1))
    assert not is_supported(torch.zeros(1, device="meta"))


def test_asking_where_a_tensor_is_imports_nothing_but_memory():
    lines = Path(device.__file__).read_text().splitlines()
    ours = [line.split()[1] for line in lines if line.startswith(("from ring_plugins", "import ring_plugins"))]
    assert ours == ["ring_plugins.core.arrays.memory"]


def test_tensors_on_a_gpu_are_unpickled_on_the_receivers(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    item = {"here": torch.arange(3.0), "more": [torch.ones(2, dtype=torch.int8), "text"]}
    data = pickle.dumps(device.for_other_gpus(item))
    found = pickle.loads(data)
    assert found["here"].tolist() == [0, 1, 2] and found["more"][0].tolist() == [1, 1] and found["more"][1] == "text"
    placed = []
    monkeypatch.setattr(torch.UntypedStorage, "cuda", lambda storage: placed.append(len(storage)) or storage)
    monkeypatch.setattr(device, "KIND", "cpu")
    pickle.loads(data)
    assert placed == [12, 2]


def test_handle_0_is_the_default_stream(monkeypatch):
    monkeypatch.setattr(torch.cuda, "default_stream", lambda index: f"default of {index}")
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: f"{handle} of {device}")
    streams = device.TorchStreams(1)
    assert [streams.external(handle) for handle in (0, 7, 0)] == ["default of 1", "7 of 1", "default of 1"]


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.complex32])
def test_types_that_the_core_does_not_know_are_moved_but_not_reduced(gpu, dtype):
    mine, out = torch.ones(3).to(dtype), torch.zeros(3).to(dtype)
    assert memory_of(mine).nbytes == 3 * mine.itemsize
    gpu.communicator.broadcast(memory_of(mine), root=0)
    gpu.communicator.all_gather(memory_of(mine), memory_of(out), [3])
    gpu.communicator.synchronize()
    assert out.view(torch.uint8).tolist() == mine.view(torch.uint8).tolist()
    with pytest.raises(ArgumentError, match=f"op=SUM for dtype={str(dtype).removeprefix('torch.')}"):
        gpu.communicator.all_reduce(memory_of(mine), Op.SUM)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e5m2, torch.complex64])
def test_numbers_are_scaled_in_float32_and_rounded_once(gpu, dtype):
    numbers = (torch.rand(64) + 1).to(dtype)
    exact = (numbers.to(torch.complex64 if dtype.is_complex else torch.float32) * (1 / 3)).to(dtype)
    scaled = numbers.clone()
    TorchStreams(0).scale(memory_of(scaled), 1 / 3)
    assert torch.equal(scaled.view(torch.uint8), exact.view(torch.uint8))


@pytest.mark.parametrize(("capturing", "waited"), [((), [1, 3]), ((2, 3), [3])])
def test_a_captured_bucket_waits_for_streams_of_the_graph_only(monkeypatch, capturing, waited):
    driver = SimpleNamespace(is_capturing=lambda stream: stream in capturing)
    monkeypatch.setattr("ring_plugins.core.gpu.load_driver", lambda: SimpleNamespace(keeping=driver))
    streams, found = TorchStreams(0), []
    monkeypatch.setattr(
        streams,
        "external",
        lambda handle: SimpleNamespace(handle=handle, wait_stream=lambda other: found.append(other.handle)),
    )
    for stream in (1, 3, 2):
        monkeypatch.setattr(streams, "current", lambda stream=stream: stream)
        streams.note()
    streams.catch_up()
    assert sorted(found) == waited
