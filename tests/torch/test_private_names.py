"""What private names of torch are taken for: a version of torch that changes one fails here, not in somebody's step."""

import importlib
from typing import Any

import torch
from torch.autograd import Variable
from torch.nn.modules import batchnorm
from torch.utils import _pytree


def test_versions_and_uses_of_memory() -> None:
    gradient = torch.zeros(4)
    before = gradient._version
    gradient.add_(1)
    assert gradient._version == before + 1  # counts what is written in place, also through views
    view = gradient[1:]
    view.add_(1)
    assert gradient._version == before + 2
    assert view._is_view() and not gradient._is_view()
    storage = gradient.untyped_storage()
    assert torch._C._storage_Use_Count(storage._cdata) == 3  # two tensors and this name
    del view
    assert torch._C._storage_Use_Count(storage._cdata) == 2
    copies = [torch.zeros(4)]
    torch._foreach_copy_(copies, [gradient])
    assert copies[0].equal(gradient)


def test_kinds_of_tensors() -> None:
    assert torch._efficientzerotensor(2)._is_zerotensor() and not torch.zeros(2)._is_zerotensor()
    rows = torch.sparse_coo_tensor([[2, 2]], [1.0, 3.0], (4,))
    assert (rows._nnz(), rows._indices().tolist(), rows._values().tolist()) == (2, [[2, 2]], [1.0, 3.0])  # not added up
    assert _pytree.tree_leaves({"a": [1, (2,)], "b": 3}) == [1, 2, 3]
    assert _pytree.tree_map_only(int, str, {"a": [1, 2.0]}) == {"a": ["1", 2.0]}


def test_what_a_backward_tells() -> None:
    seen: list[object] = []
    weight = torch.ones(2, requires_grad=True)

    def hook(parameter: torch.Tensor) -> None:
        seen.append(torch._C._current_graph_task_id() >= 0 and torch._C._current_autograd_node() is not None)
        Variable._execution_engine.queue_callback(lambda: seen.append(torch._C._current_autograd_node()))

    weight.register_post_accumulate_grad_hook(hook)
    assert hook in weight._post_accumulate_grad_hooks.values()  # type: ignore[attr-defined]
    assert torch._C._current_graph_task_id() == -1
    weight.sum().backward()
    assert seen == [True, None]  # the callback runs before `backward()` returns, in no node


def test_what_a_scaler_reads_gradients_by() -> None:
    """Every way to unscale goes through one method, which is wrapped to average before."""
    seen: list[object] = []

    class Scaler(torch.amp.GradScaler):
        def _unscale_grads_(self, optimizer: torch.optim.Optimizer, *args: Any) -> dict[torch.device, torch.Tensor]:
            seen.append(optimizer)
            return super()._unscale_grads_(optimizer, *args)

    for unscales in (True, False):
        for fused in (True, False):
            weight = torch.nn.Parameter(torch.ones(2))
            optimizer, scaler = torch.optim.SGD([weight], 0.1, fused=fused), Scaler("cpu")
            scaler.scale(weight.sum()).backward()
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            assert seen.pop() is optimizer and not seen


def test_names_in_modules() -> None:
    layer = torch.nn.BatchNorm1d(3)
    assert isinstance(layer, batchnorm._BatchNorm) and isinstance(layer, batchnorm._NormBase)
    assert layer._parameters["weight"] is layer.weight and layer._buffers["running_mean"] is layer.running_mean
    layer._check_input_dim(torch.ones(2, 3))
    assert not isinstance(torch.nn.LayerNorm(3), batchnorm._NormBase)
    assert callable(importlib.import_module("torch._dynamo.trace_rules").add)
    # By name of a scheme; `torch.distributed.rendezvous` is a function, too.
    assert {"env", "tcp", "file"} <= {*importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers}
