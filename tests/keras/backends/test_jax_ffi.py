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

    if jax_ffi.find_target() is None:
        pytest.skip("this JAX lacks the foreign function interface")


def doubled(calls, key="double", factor=2):
    """A compiled function of one array; each call of this one traces anew."""
    import jax

    def scale(arrays):
        arrays[0] *= factor

    return jax.jit(lambda x: calls.in_place(key, scale, [x + 0])[0])


def test_each_trace_calls_its_own_function_on_its_own_arrays():
    import jax

    from ring_plugins.keras.backends.jax_ffi import HostCalls

    calls, other = HostCalls(), HostCalls()
    twice, thrice = doubled(calls), doubled(other, factor=3)
    for _ in range(2):
        assert twice(jax.numpy.ones((2, 3))).tolist() == [[2.0] * 3] * 2
        assert thrice(jax.numpy.ones((2, 3))).tolist() == [[3.0] * 3] * 2
        assert thrice(jax.numpy.arange(4, dtype="int32")).tolist() == [0, 3, 6, 9]


def test_new_traces_keep_nothing_that_an_earlier_one_kept(monkeypatch):
    import jax

    from ring_plugins.keras.backends.jax_ffi import HostCalls

    registered = []
    register = jax.ffi.register_ffi_target
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda *a, **k: (registered.append(a), register(*a, **k)))
    calls = HostCalls()
    for _ in range(5):
        assert doubled(calls)(jax.numpy.ones(3)).tolist() == [2.0] * 3
    assert (registered, len(calls._calls)) == ([], 1)  # XLA keeps every handler that is registered
    owned = weakref.ref(next(iter(calls._calls.values())))
    del calls
    jax.clear_caches()
    gc.collect()
    assert owned() is None


def test_a_step_that_outlived_its_averaging_says_so():
    import jax

    from ring_plugins.keras.backends.jax_ffi import HostCalls

    calls = HostCalls()
    step = doubled(calls)
    assert step(jax.numpy.ones(3)).tolist() == [2.0] * 3
    calls._calls.clear()  # as when its owner is gone
    with pytest.raises(Exception, match="averages with an optimizer that does so no longer"):
        step(jax.numpy.ones(3)).block_until_ready()


SEVERAL_DEVICES = """
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.keras.backends.jax_ffi import HostCalls

calls = HostCalls()

def double(arrays):
    arrays[0] *= 2

def step(x):
    return calls.in_place("double", double, [x + 0])[0]

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
