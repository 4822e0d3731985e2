"""A script from Horovod looks for everything in one module."""

import subprocess
import sys
import textwrap

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
        (ring_plugins.torch, "Adasum", r"write op=hvd\.Average: Adasum does not exist here"),
        (ring_plugins.torch, "add_process_set", r"ring_plugins\.Group\(ranks\)"),
        (ring_plugins, "join", "import it from ring_plugins.torch$"),
        (ring_plugins, "RingStrategy", "import it from ring_plugins.lightning$"),
        (ring_plugins, "DistributedOptimizer", "import it from ring_plugins.torch or ring_plugins.keras$"),
        (ring_plugins.torch, "BroadcastCallback", "import it from ring_plugins.keras$"),
        (ring_plugins.horovod, "broadcast_parameters", "import it from ring_plugins.horovod.torch$"),
        (ring_plugins, "get_rank", r"write ring_plugins\.rank\(\)$"),
        (ring_plugins, "world_size", r"write ring_plugins\.size\(\)$"),
        (ring_plugins, "all_gathr", r"did you mean ring_plugins\.all_gather\?$"),
        (ring_plugins, "Average", r"did you mean ring_plugins\.AVERAGE\?$"),
        (ring_plugins, "hvd", r"write import ring_plugins\.horovod\.torch as hvd"),
        (ring_plugins.torch, "nothing", "has no attribute 'nothing'$"),
    ],
)
def test_a_name_that_a_module_lacks_is_answered_with_where_it_is(module, name, remedy):
    with pytest.raises(AttributeError, match=remedy):
        getattr(module, name)
    assert not hasattr(module, name)


def test_a_from_import_is_answered_in_the_same_way_without_importing_a_framework():
    script = """
        import sys
        for name in ("RingStrategy", "BroadcastCallback", "allreduce", "Sum", "nothing"):
            try:
                exec(f"from ring_plugins import {name}")
            except ImportError as error:
                print(error)
        import ring_plugins
        try:
            ring_plugins.keras
        except AttributeError as error:
            print(error)
        print([name for name in ("torch", "keras", "lightning") if name in sys.modules])
        from ring_plugins import launcher  # a package inside
    """
    said = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    where, *others = said.stdout.splitlines()
    assert where == "cannot import name 'RingStrategy' from 'ring_plugins': import it from ring_plugins.lightning"
    assert others[0].endswith(": import it from ring_plugins.keras")
    assert others[1].endswith(": write ring_plugins.all_reduce(x) (docs/from_horovod.md)")
    assert others[2].endswith(": did you mean ring_plugins.SUM?")
    assert others[3].startswith("cannot import name 'nothing' from 'ring_plugins' (/")
    assert others[4:] == ["module 'ring_plugins' has no attribute 'keras': write import ring_plugins.keras", "[]"]
