"""Compiled JAX functions call Python on XLA's own memory."""

import gc
import os
import subprocess
import sys
import weakref

import pytest


@pytest.fixture(autouse=True)
def _needs_the_interface():
    pytest.importorskip("jax")
    from ring_plugins.keras.backends import jax_ffi

    if not jax_ffi.has_buffer_callback():
        pytest.skip("this JAX lacks buffer_callback")


class Owner:
    """Has a factor by which a compiled function multiplies an array in place."""

    def __init__(self, factor=2):
        self.factor = factor

    def scale(self, arrays):
        arrays[0] *= self.factor

    def compiled(self):
        import jax

        from ring_plugins.keras.backends.jax_ffi import call_on_host
        from ring_plugins.keras.buckets import call_weakly

        scale = call_weakly(self.scale)
        return jax.jit(lambda x: call_on_host(scale, [x + 0])[0])


def test_each_trace_calls_its_own_function_on_its_own_arrays():
    import jax

    two, three = Owner(2), Owner(3)
    twice, thrice = two.compiled(), three.compiled()
    for _ in range(2):
        assert twice(jax.numpy.ones((2, 3))).tolist() == [[2.0] * 3] * 2
        assert thrice(jax.numpy.ones((2, 3))).tolist() == [[3.0] * 3] * 2
        assert thrice(jax.numpy.arange(4, dtype="int32")).tolist() == [0, 3, 6, 9]


def test_results_share_the_memory_of_operands_and_calls_of_a_step_run_in_order():
    import jax
    import numpy as np

    from ring_plugins.keras.backends.jax_ffi import call_on_host

    calls = []

    def first(arrays):
        calls.append(("first", [array.shape for array in arrays]))

    def second(arrays):
        calls.append(("second", [array.shape for array in arrays]))

    def step(x, y):
        return *call_on_host(first, [x * 2, y * 2]), *call_on_host(second, [x * 3])

    results = jax.jit(step)(np.ones((2, 3), "float32"), np.ones((), "bfloat16"))
    assert [float(result.sum()) for result in results] == [12, 2, 18]
    assert calls == [("first", [(6,), (1,)]), ("second", [(6,)])]
    assert "((0, 0), (1, 1))" in str(jax.make_jaxpr(step)(np.ones((2, 3)), np.ones(())))


def test_a_compiled_step_does_not_keep_its_owner_and_says_so_when_that_is_gone():
    import jax

    owner = Owner()
    step, reference = owner.compiled(), weakref.ref(owner)
    assert step(jax.numpy.ones(3)).tolist() == [2.0] * 3
    del owner
    gc.collect()
    assert reference() is None
    with pytest.raises(Exception, match="averages with an optimizer that does so no longer"):
        step(jax.numpy.ones(3)).block_until_ready()


SEVERAL_DEVICES = """
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.keras.backends.jax_ffi import call_on_host

def double(arrays):
    arrays[0] *= 2

def step(x):
    return call_on_host(double, [x + 0])[0]

assert len(jax.devices()) == 2
x = jax.numpy.ones((2, 3))
assert jax.jit(step)(jax.device_put(x, jax.devices()[1])).tolist() == [[2.0] * 3] * 2
mesh = Mesh(jax.devices(), ("batch",))
divided = jax.device_put(x, NamedSharding(mesh, PartitionSpec("batch")))
for compiled, operand in ((jax.jit(step), divided), (jax.pmap(step), x)):
    try:
        compiled(operand)
    except ArgumentError as error:
        print(error)
"""


def test_a_step_on_several_devices_of_a_process_is_rejected_with_the_remedy():
    flags = "--xla_force_host_platform_device_count=2"
    environment = {**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-c", SEVERAL_DEVICES]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert len(lines) == 2, found.stdout
    for line in lines:
        assert line.startswith("this step is compiled for 2 devices") and "one process for each device" in line
