"""A script from Horovod looks for everything in one module."""

import pytest

import ring_plugins
import ring_plugins.horovod.torch
import ring_plugins.torch


@pytest.mark.parametrize(
    ("module", "name", "remedy"),
    [
        (ring_plugins.torch, "init", "has no attribute 'init': it is ring_plugins.init"),
        (ring_plugins.torch, "allreduce", r"write ring_plugins\.all_reduce\(x\) \(docs/from_horovod\.md\)"),
        (ring_plugins, "allreduce", r"write ring_plugins\.all_reduce\(x\)"),
        (ring_plugins.horovod.torch, "Adasum", r"write op=hvd\.Average: Adasum does not exist here"),
        (ring_plugins.horovod.torch, "add_process_set", "new_group"),
        (ring_plugins.horovod.torch, "compression", "compression='fp16'"),
        (ring_plugins.torch, "join", "drop_last=True"),
        (ring_plugins.torch, "nothing", "has no attribute 'nothing'$"),
    ],
)
def test_a_name_that_a_module_lacks_is_answered_with_where_it_is(module, name, remedy):
    with pytest.raises(AttributeError, match=remedy):
        getattr(module, name)
    assert not hasattr(module, name)
