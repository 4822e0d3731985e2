"""When buffers are broadcast, and in what batches."""

import torch
from torch import nn

from ring_plugins.lightning import buffers
from ring_plugins.lightning.buffers import BufferBroadcast


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("codes", torch.zeros(3))
        self.register_buffer("nothing", None)
        self.alias = self.codes


def broadcast(monkeypatch, model, method):
    sent = []
    monkeypatch.setattr(buffers, "_broadcast", lambda tensors, _: sent.extend(tuple(t.shape) for t in tensors))
    getattr(BufferBroadcast(model), method)()
    return sorted(sent)


def test_running_statistics_are_left_out_of_training_steps(monkeypatch):
    model = Model()
    assert broadcast(monkeypatch, model, "before_training_step") == [(3,)]
    assert broadcast(monkeypatch, model, "broadcast_all") == [(), (2,), (2,), (3,)]
    model.norm.eval()  # its forward reads them
    assert broadcast(monkeypatch, model, "before_training_step") == [(), (2,), (2,), (3,)]


def test_batches_hold_one_type_and_a_limited_number_of_bytes(monkeypatch):
    monkeypatch.setattr(buffers, "_COALESCED_BYTES", 16)
    tensors = [torch.zeros(3), torch.zeros(1, dtype=torch.int64), torch.zeros(0), torch.zeros(1), torch.zeros(1)]
    batches = [[(tensor.dtype, tensor.numel()) for tensor in batch] for batch in buffers._batches(tensors)]
    assert batches == [[(torch.float32, 3), (torch.float32, 1)], [(torch.float32, 1)], [(torch.int64, 1)]]
